"""Training of one rank: building its parts, the training loop, checkpoints, joining a run."""
