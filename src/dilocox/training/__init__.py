"""One rank's training: builder, trainer, checkpoints, entry of a site."""
