"""The signed log of a run: statements, digests, Merkle tree, and the content-addressed store."""
