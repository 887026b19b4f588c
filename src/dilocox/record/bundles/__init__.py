"""Bundles: a run's record in tar files at any storage, each named by a signed statement."""
