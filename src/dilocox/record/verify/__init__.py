"""Verification of a record: claims, replay of outer steps, audits, published models."""
