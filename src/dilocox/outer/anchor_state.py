"""What a rank holds of the run's anchor when a round begins: a replay may begin there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dilocox.outer.loop import OuterLoop


@dataclass(frozen=True)
class AnchorCopy:
    """A copy of the anchor and the outer momentum of all pieces of a rank, in host memory."""

    tensors: Mapping[str, Tensor]
    """`anchor/PIECE`, flat fp32, and `momentum/PIECE`, flat in the run's dtype; piece by piece."""
    landed: tuple[int, ...]
    """By piece: the last round whose outer step the piece has taken; -1: none."""
    payloads: Sequence[tuple[Tensor, ...]]
    """Payloads of the exchanges that have ended and not landed: a replay needs them, too."""


def copy_anchor(outer: OuterLoop, round_: int) -> AnchorCopy | None:
    """What the rank holds when `round_` begins; none of a rank that enters, or was overtaken."""
    if outer.behind or outer.awaiting:
        return None
    landed = [round_ - 1] * len(outer.states)
    payloads = []
    for item in outer.under_way_now():
        for piece in outer.pieces_of(item):
            landed[piece] = min(landed[piece], item.key.round - 1)
        ended = item.outcome
        if ended.done() and not ended.cancelled() and ended.exception() is None:
            payloads.append(ended.result().payloads)
    tensors = {}
    for piece, state in enumerate(outer.states):
        tensors[f"anchor/{piece}"] = state.anchor.detach().to("cpu", copy=True)
        tensors[f"momentum/{piece}"] = state.momentum.detach().to("cpu", copy=True)
    return AnchorCopy(tensors, tuple(landed), payloads)
