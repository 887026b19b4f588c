"""The coordinator itself: requests come in, events are logged, replies go out."""
