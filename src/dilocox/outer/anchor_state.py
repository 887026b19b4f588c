"""Copy of a rank's part of the anchor at the beginning of a round.

A replay of the run may begin from this copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from dilocox.outer.contribution import Outcome
from dilocox.outer.loop import OuterLoop


@dataclass(frozen=True)
class AnchorCopy:
    """Copy in host memory of the anchor and the outer momentum of all pieces of a rank."""

    tensors: Mapping[str, Tensor]
    """For each piece, `anchor/PIECE` (flat fp32) and `momentum/PIECE` (flat, in the dtype that the
    run keeps momentum in). PIECE is the piece's number."""
    landed: tuple[int, ...]
    """By piece: the last round whose outer step the piece has taken; -1 if it has taken none."""
    under_way: Sequence[Future[Outcome]] = ()
    """Exchanges that have not landed. A replay from this anchor needs their payloads."""

    def ended(self) -> list[tuple[Tensor, ...]]:
        """Return the payloads of each exchange of `under_way` that has succeeded by now."""
        done = [each for each in self.under_way if each.done() and not each.cancelled()]
        return [each.result().payloads for each in done if each.exception() is None]


def copy_anchor(outer: OuterLoop, round_: int) -> AnchorCopy | None:
    """Copy the anchor and the momentum as they are when `round_` begins.

    Returns None while a site enters the run, and after an exchange took place without the site:
    the rank's anchor is then not the run's anchor.
    """
    if outer.status.overtaken or outer.status.awaiting:
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
