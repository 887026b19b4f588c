"""Protocols for the parts of coordinator and heartbeats that a trainer needs.

In a run, `CoordinatorClient` and `RankControl` provide these calls. An audit repeats a round
without a coordinator, and gives the trainer a null object instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dilocox.coordinator.protocol.entry_messages import CheckPiecesReply, PieceDigest
from dilocox.coordinator.protocol.messages import (
    BeatReply,
    Entering,
    Measured,
    PlanReply,
    ReportKind,
    RoundPlan,
)
from dilocox.outer.loop import OuterLoop
from dilocox.training.builder import RankParts
from dilocox.training.rank_state import RankState


class LeaseControl(Protocol):
    """The rank's position, its lease, and the newest state of the run; see `RankControl`."""

    @property
    def news(self) -> BeatReply:
        """The newest state of the run. Raises the error that ended the rank's part in the run."""

    def touch(self) -> None:
        """Note that the training loop makes progress."""

    def at(self, tick: int, round_: int, slot: int, slot_seconds: float | None) -> None:
        """Note the rank's position, and its seconds per slot."""

    def hurry(self) -> None:
        """Ask for newer state, because a caller waits for it."""

    def may_finish(self, tick: int) -> bool:
        """Wait for the lease. Returns whether the slot that ends at `tick` may be finished."""


class ControlPlane(Protocol):
    """Requests of a training rank to the coordinator; see `CoordinatorClient`."""

    def poll_plan(self, round_: int, wait: float = 0.0) -> PlanReply:
        """Ask for the plan of a round, and wait up to `wait` seconds for it."""

    def round_done(self, round_: int, measured: Measured | None = None) -> None:
        """Report that this rank has finished a round."""

    def report(self, round_: int, metrics: Mapping[str, Any], kind: ReportKind = "round") -> object:
        """Report metrics of this site."""

    def ready(self) -> None:
        """Report that this rank of an entering site holds the full state."""

    def show_pieces(self, pieces: Sequence[PieceDigest]) -> None:
        """Report the pieces that this rank holds, while another site enters."""

    def check_pieces(
        self, entry: Entering, pieces: Sequence[PieceDigest], all_came: bool
    ) -> CheckPiecesReply:
        """Ask whether pieces that this entering rank has received equal those of most sites."""

    def depart(self) -> None:
        """Report that this rank of a leaving site has finished all of its exchanges."""

    def fail(self, reason: str) -> None:
        """End the run as failed, at all sites."""

    def finish(self, *, complete: bool = True) -> None:
        """Report that this rank is done."""


class CheckpointHook(Protocol):
    """Writes checkpoints and the record for a trainer; see `Checkpointer`."""

    def keep_theta(self, rank: RankParts) -> None:
        """Keep a copy of theta_0 that another site has made, if the run asks for it."""

    def begin_round(self, outer: OuterLoop, plan: RoundPlan) -> None:
        """Note that the round of `plan` begins."""

    def save(self, own: RankState, plan: RoundPlan | None, *, last: bool = False) -> None:
        """Write a checkpoint of this rank's state."""

    def keep_best(self, rank: RankParts, round_: int, loss: float, *, first: bool) -> None:
        """Write the anchor after `round_`, if its held-out loss is the lowest so far."""

    def wait(self) -> None:
        """Wait until everything up to now is written."""

    def ends_run(self, rank: RankParts, plan: RoundPlan) -> bool:
        """Return whether this site ends the run after the flush of `plan`."""

    def publish(self, rank: RankParts, plan: RoundPlan) -> None:
        """Write the anchor as the run's model."""
