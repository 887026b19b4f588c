"""A donor's copy of one piece's agreed state, which an entering site takes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Snapshot:
    """One piece's agreed state after the landings of `tick`."""

    piece: int
    tick: int
    tensors: Mapping[str, torch.Tensor]
    """What all sites agree on, flat fp32 on the CPU; empty if the receiver has the same."""
    codec: str = ""
    """Low-rank codec that `warm` among the tensors is of."""
    landed: int = -1
    """Round of the exchange that landed on it last; -1: none since the run started."""
