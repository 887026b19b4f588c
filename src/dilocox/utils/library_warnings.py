"""Silences warnings of PyTorch that do not concern the readers of a run's logs."""

from __future__ import annotations

import warnings


def silence() -> None:
    """Silence these warnings in all threads of a rank's process; other warnings stay."""
    silence_saves()
    # PyTorch gives it for deprecated names, whose successors the lowest supported version lacks.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)


def silence_saves() -> None:
    """Silence the warning that PyTorch gives at every write of a checkpoint by one process.

    PyTorch gives it although `no_dist` asks for one process. A user's own process silences it
    alone: other warnings may concern the user's code.
    """
    warnings.filterwarnings(
        "ignore",
        message="torch.distributed is disabled, unavailable or uninitialized",
        category=UserWarning,
    )
