"""Warnings of PyTorch for its programmers, which say nothing to who reads a run's logs."""

from __future__ import annotations

import warnings

_SILENT: tuple[tuple[str, type[Warning]], ...] = (
    # Of every write of a checkpoint, though `no_dist` says that one process is meant.
    ("torch.distributed is disabled, unavailable or uninitialized", UserWarning),
    # Of names whose successors the lowest version of PyTorch does not have.
    ("`torch.distributed", FutureWarning),
)
"""Beginnings of messages, and their classes."""


def silence() -> None:
    """Leave these warnings out in this process, in all of its threads; others stay."""
    for message, category in _SILENT:
        warnings.filterwarnings("ignore", message=message, category=category)
