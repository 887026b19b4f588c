"""What a rank holds of the run's anchor when a round begins: a replay may begin there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from dilocox.outer.contribution import Outcome
from dilocox.outer.loop import OuterLoop


@dataclass(frozen=True)
class AnchorCopy:
    """A copy of the anchor and the outer momentum of all pieces of a rank, in host memory."""

    tensors: Mapping[str, Tensor]
    """`anchor/PIECE`, flat fp32, and `momentum/PIECE`, flat in the run's dtype; piece by piece."""
    landed: tuple[int, ...]
    """By piece: the last round whose outer step the piece has taken; -1: none."""
    under_way: Sequence[Future[Outcome]] = ()
    """Exchanges that have not landed: a replay from this anchor needs their payloads."""

    def ended(self) -> list[tuple[Tensor, ...]]:
        """Payloads of each exchange of `under_way` that has ended by now."""
        done = [each for each in self.under_way if each.done() and not each.cancelled()]
        return [each.result().payloads for each in done if each.exception() is None]


def copy_anchor(outer: OuterLoop, round_: int) -> AnchorCopy | None:
    """What the rank holds when `round_` begins; none of a rank that enters, or was overtaken."""
    if outer.behind or outer.awaiting:
        return None
    landed = [round_ - 1] * len(outer.states)
    items = outer.under_way_now()
    for item in items:
        for piece in outer.pieces_of(item):
            landed[piece] = min(landed[piece], item.key.round - 1)
    tensors = {}
    for piece, state in enumerate(outer.states):
        tensors[f"anchor/{piece}"] = state.anchor.detach().to("cpu", copy=True)
        tensors[f"momentum/{piece}"] = state.momentum.detach().to("cpu", copy=True)
    return AnchorCopy(tensors, tuple(landed), [item.outcome for item in items])
