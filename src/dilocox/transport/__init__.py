"""Exchanges between sites: links, swaps of payloads, votes, transfer of state to joining sites."""
