"""Tokens/s of every method and of its peers over slow links, against sites without a network."""
