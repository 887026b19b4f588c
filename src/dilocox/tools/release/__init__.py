"""Releases a run's model as a signed folder with a model card, and publishes a whole run."""
