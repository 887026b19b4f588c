"""The signed log: statements, digests, Merkle tree, content-addressed store."""
