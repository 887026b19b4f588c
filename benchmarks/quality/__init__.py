"""Held-out loss of every method against the bytes it sends, side by side in one engine."""
