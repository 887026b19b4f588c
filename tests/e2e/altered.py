"""Sites whose processes are altered, for tests of admission; the shipped code has no such thing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping

from torch import Tensor

from dilocox import assembly
from dilocox.outer.state import PieceState


def contributions_times(factors: Mapping[str, float]) -> None:
    """From now on, ranks forked from this process contribute their u times the factor of their
    site; sites that are not named stay honest."""

    class Altered(PieceState):
        def boundary(
            self, live: Mapping[str, Tensor], weight: float, decay: float
        ) -> tuple[Tensor, bool]:
            u, finite = super().boundary(live, weight, decay)
            return u.mul(factors.get(_site(), 1.0)), finite

        def committed(
            self, u: Tensor, sent: Tensor | None, second_error: tuple[int, Tensor] | None = None
        ) -> None:
            # What did not count must not come back and be altered again.
            super().committed(u, u if _site() in factors else sent, second_error)

    assembly.PieceState = Altered  # type: ignore[misc]


def _site() -> str:
    return multiprocessing.current_process().name.split("-")[0]
