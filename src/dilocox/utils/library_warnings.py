"""Silences warnings of PyTorch that do not concern the readers of a run's logs."""

from __future__ import annotations

import warnings

_SILENT: tuple[tuple[str, type[Warning]], ...] = (
    # PyTorch gives it at every write of a checkpoint, although `no_dist` asks for one process.
    ("torch.distributed is disabled, unavailable or uninitialized", UserWarning),
    # PyTorch gives it for deprecated names, whose successors the lowest supported version lacks.
    ("`torch.distributed", FutureWarning),
)
"""Beginning of the message, and class, of each silenced warning."""


def silence() -> None:
    """Silence the warnings of `_SILENT` in all threads of this process; other warnings stay."""
    for message, category in _SILENT:
        warnings.filterwarnings("ignore", message=message, category=category)
