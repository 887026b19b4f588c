"""Attested machines: evidence, policy and verdicts; extra `[tee]` (docs/attestation.md)."""
