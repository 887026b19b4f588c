"""NCCL's flight recorder: the last collectives of each rank, written when one of them times out.

The variables are those of torch 2.11 to 2.13 (FlightRecorder.hpp, ProcessGroupNCCL.hpp). In a pair
of names the first one is the new name, which torch prefers to the old one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ENTRIES = 2000
"""Collectives that the recorder keeps; each takes about a kilobyte of the machine's memory."""
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)


def settings(environment: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """Return the variables to add to `environment` to switch the recorder on.

    The dump of a rank is the file whose path is `prefix` followed by the rank's number. A variable
    that the user has set, by the new or the old name, is left out.
    """
    if any(name in environment for name in _BUFFER):
        buffer: dict[str, str] = {}
    else:
        # The part of torch that decides on a dump reads only the old name, so both are set.
        buffer = dict.fromkeys(_BUFFER, str(ENTRIES))
    chosen = {_FILE: str(prefix), _ON_TIMEOUT: "1"}
    other = {
        names[0]: value
        for names, value in chosen.items()
        if not any(name in environment for name in names)
    }
    return buffer | other


def record_collectives(prefix: Path) -> None:
    """Switch the recorder on for this process. Call this before NCCL starts."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(settings(os.environ, prefix))
