"""Serve a model, or write it for other servers: OpenAI's endpoints, GGUF, Ollama, vLLM."""
