"""Evidence by a fixed protocol (PROTOCOL.md): tokens per parameter, sizes, unseen text."""
