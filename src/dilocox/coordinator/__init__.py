"""Control plane of a run: members, plans, contribution sets, token ranges, stop and checkpoints.

The coordinator is a small process outside the data path: payloads never pass through it. No module
of this package imports torch.
"""
