"""Wall-clock time to the loss of synchronous training, over a slow link (PROTOCOL.md)."""
