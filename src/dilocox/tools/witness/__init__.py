"""Witnesses, which cosign checkpoints of a run's log: what they keep, serve, watch and are asked.

Nothing here is on the path of training. A dead witness changes nothing in a run.
"""
