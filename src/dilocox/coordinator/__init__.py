"""Control plane of a run: members, plans, contribution sets, token ranges, stop and checkpoints.

A small process that is never in the data path: no module in this package imports torch.
"""
