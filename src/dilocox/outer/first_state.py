"""Check at the start of a run: is the founder's state equal to the state that this site made?

Every site makes theta_0 itself before it receives theta_0 of the founder. Weights drawn from a seed
differ in their last bits between kinds of processors. Stored weights are equal everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.errors import JoinError
from dilocox.outer.snapshot import Snapshot

ROUNDING = 1e-3
"""Largest accepted difference between weights that two processors draw from one seed: norm of the
difference over norm of the weights. Measured: 1e-7."""


class OtherStartError(JoinError):
    """The founder begins the run from a state other than the state that the run file names."""


@dataclass(frozen=True)
class FirstState:
    """Checks the pieces of theta_0 that `site` receives from `donor`."""

    site: str
    donor: str
    stored: bool
    """True if theta_0 comes from the files of `model.path`; False if `run.seed` draws it."""
    files: str = "model.path"
    """Key of the run file that names these files."""

    def difference(
        self, snapshot: Snapshot, anchor: Tensor, momentum: Tensor, starting: bool
    ) -> float:
        """Return how far a piece is from this site's: norm of the difference over norm of `anchor`.

        Args:
            snapshot: the received piece. Without tensors, or from a slot after the start, the
                result is 0.
            anchor: this rank's own anchor of the piece, flat.
            momentum: this rank's own outer momentum of the piece, flat.
            starting: True if the run has not begun yet.

        Raises `OtherStartError` if an honest founder could not have sent the piece.
        """
        if not snapshot.tensors:
            return 0.0
        if snapshot.tick:
            # Rounds have changed the pieces since the start, so there is nothing to compare with.
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
        source = f"{self.files} holds" if self.stored else "run.seed gives"
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
        """Return the message for a piece whose difference `off` is explained by rounding."""
        return (
            f"theta_0 of {self.donor} is {off:.1g} of its size off what run.seed gives here, no "
            "more than between two kinds of processors: it is taken"
        )


def _apart(given: Tensor, own: Tensor) -> float:
    """Return the norm of the difference over the norm of `own`; NaN if a value is NaN.

    If `own` is all zero, the result is infinity for any difference, and 0 without a difference.
    """
    here = own.detach().float().cpu()
    size = float(torch.linalg.vector_norm(here, dtype=torch.float64))
    off = float(torch.linalg.vector_norm(given.float() - here, dtype=torch.float64))
    if size:
        return off / size
    return math.inf if off else off
