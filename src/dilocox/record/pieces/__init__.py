"""Erasure-coded pieces of payloads: any k of n pieces give the payloads back."""
