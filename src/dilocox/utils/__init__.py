"""Small general tools: files, processes, retries, tracing. Nothing here knows training."""
