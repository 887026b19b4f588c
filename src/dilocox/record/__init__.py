"""The record: what happened in a run, signed and chained, so that a stranger can check it.

Digests, a content-addressed store, signed statements and a transparency log; on top of them what a
coordinator and a site write during a run, and `verify`, which replays every outer step from it.
"""
