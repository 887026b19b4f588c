"""Is the state that the founder gives, when a run starts, the one that was made here?

Every site makes theta_0 itself before it hears of the founder's. Weights of a seed differ in their
last bits between processors; stored weights are the same everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.errors import JoinError
from dilocox.outer.snapshot import Snapshot

ROUNDING = 1e-3
"""Norm of the difference between weights that two processors draw from one seed, over the norm of
the weights: at most this. Measured: 1e-7."""


class OtherStartError(JoinError):
    """The founder begins the run from another state than the run file says."""


@dataclass(frozen=True)
class FirstState:
    """Judges what comes of theta_0 from `donor`."""

    site: str
    donor: str
    stored: bool
    """Theta_0 is `model.path`'s weights; else those of `run.seed`."""

    def difference(
        self, snapshot: Snapshot, anchor: Tensor, momentum: Tensor, starting: bool
    ) -> float:
        """How far a piece is from the `anchor` that was made here, over the norm of that.

        `anchor` and `momentum`: flat, as this rank holds them. `starting`: the run has not begun.
        Raises `OtherStartError` for a piece that no honest founder gives.
        """
        if not snapshot.tensors:
            return 0.0
        if snapshot.tick:
            # Once the run has begun, pieces are what the rounds have made of them.
            if starting:
                raise self._error(f"piece {snapshot.piece} is of slot {snapshot.tick}")
            return 0.0
        given: dict[str, Tensor] = {}
        for name, own in (("anchor", anchor), ("momentum", momentum)):
            found = snapshot.tensors.get(name)
            if found is None or found.shape != own.shape:
                raise self._error(f"piece {snapshot.piece} has no {name} of its length")
            given[name] = found
        off = _apart(given["anchor"], anchor)
        if not off <= (0.0 if self.stored else ROUNDING):
            raise self._error(f"piece {snapshot.piece} is {off:.1g} of its size off")
        if not torch.equal(given["momentum"].float(), momentum.float().cpu()):
            raise self._error(f"piece {snapshot.piece} has another outer momentum")
        return off

    def _error(self, what: str) -> OtherStartError:
        source = "model.path holds" if self.stored else "run.seed gives"
        mend = (
            "the same files, or the same model.revision"
            if self.stored
            else "the same versions of torch and transformers"
        )
        return OtherStartError(
            f"site {self.site}: {self.donor} begins the run from another state than {source} here "
            f"({what}); give all sites {mend}, or begin the run without {self.donor}"
        )

    def rounding(self, off: float) -> str:
        """What to say of a piece that differs no more than processors do."""
        return (
            f"theta_0 of {self.donor} is {off:.1g} of its size off what run.seed gives here, no "
            "more than between two kinds of processors: it is taken"
        )


def _apart(given: Tensor, own: Tensor) -> float:
    """Norm of the difference over the norm of `own`; not a number if a value is none."""
    here = own.detach().float().cpu()
    size = float(torch.linalg.vector_norm(here, dtype=torch.float64))
    off = float(torch.linalg.vector_norm(given.float() - here, dtype=torch.float64))
    if size:
        return off / size
    return math.inf if off else off
