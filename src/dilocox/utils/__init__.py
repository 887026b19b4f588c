"""General helpers: files, processes, retries, tracing. No module here depends on training code."""
