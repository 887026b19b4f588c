"""The coordinator's process: it takes requests, logs events and sends replies."""
