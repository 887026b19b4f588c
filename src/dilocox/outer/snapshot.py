"""A donor's copy of the agreed state of one piece, for a site that enters the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Snapshot:
    """Agreed state of one piece after the landings of `tick`."""

    piece: int
    tick: int
    """Slots since the start of the run."""
    tensors: Mapping[str, torch.Tensor]
    """Tensors of `FragmentState.agreed`, on the CPU. Empty if the receiver's tensors are equal. The
    tensors must not change: several donors may send the same snapshot at once."""
    codec: str = ""
    """Low-rank codec that the tensor `warm` belongs to; empty without one."""
    landed: int = -1
    """Round of the exchange that landed on the piece last; -1 if none has landed."""
