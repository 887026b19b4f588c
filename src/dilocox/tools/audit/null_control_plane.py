"""Null objects for a replay: there is no coordinator, no lease, and nothing to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dilocox.coordinator.protocol.entry_messages import CheckPiecesReply, PieceDigest
from dilocox.coordinator.protocol.messages import (
    BeatReply,
    Entering,
    Epoch,
    Measured,
    PlanReply,
    ReportKind,
    RoundPlan,
)
from dilocox.outer.loop import OuterLoop
from dilocox.training.builder import RankParts
from dilocox.training.rank_state import RankState


class NullControlPlane:
    """A `ControlPlane` and `LeaseControl` of a run in which nobody enters, leaves or stops."""

    news = BeatReply(
        phase="running", reason="", role="active", donor=None, founder=None, lease=0,
        stop_tick=None, epoch=Epoch(id=0, members=[]), entering=[],
    )  # fmt: skip

    def touch(self) -> None:
        """Do nothing: there is no liveness check."""

    def at(self, tick: int, round_: int, slot: int, slot_seconds: float | None) -> None:
        """Do nothing: nobody follows the rank's position."""

    def hurry(self) -> None:
        """Do nothing: there is no newer state."""

    def may_finish(self, tick: int) -> bool:
        """Return True: there is no lease."""
        return True

    def poll_plan(self, round_: int, wait: float = 0.0) -> PlanReply:
        """Return no plan: only one round is replayed."""
        return PlanReply(plan=None, waiting_for="")

    def round_done(self, round_: int, measured: Measured | None = None) -> None:
        """Do nothing: there is no ledger."""

    def report(self, round_: int, metrics: Mapping[str, Any], kind: ReportKind = "round") -> None:
        """Do nothing: there are no metrics."""

    def ready(self) -> None:
        """Do nothing: the rank does not enter a run."""

    def show_pieces(self, pieces: Sequence[PieceDigest]) -> None:
        """Do nothing: no site enters."""

    def check_pieces(
        self, entry: Entering, pieces: Sequence[PieceDigest], all_came: bool
    ) -> CheckPiecesReply:
        """Return that no piece is confirmed: there are no other sites."""
        return CheckPiecesReply(same=[], different=[], donor=None)

    def depart(self) -> None:
        """Do nothing: there is no run to leave."""

    def fail(self, reason: str) -> None:
        """Do nothing: there is no run that could fail."""

    def finish(self, *, complete: bool = True) -> None:
        """Do nothing: there is no run to finish."""


class NullCheckpointer:
    """A `CheckpointHook` that writes nothing."""

    def keep_theta(self, rank: RankParts) -> None:
        """Do nothing: no record is written."""

    def begin_round(self, outer: OuterLoop, plan: RoundPlan) -> None:
        """Do nothing: no record is written."""

    def save(self, own: RankState, plan: RoundPlan | None, *, last: bool = False) -> None:
        """Do nothing: no checkpoint is written."""

    def keep_best(self, rank: RankParts, round_: int, loss: float, *, first: bool) -> None:
        """Do nothing: no model is written."""

    def wait(self) -> None:
        """Do nothing: there are no writes to wait for."""

    def ends_run(self, rank: RankParts, plan: RoundPlan) -> bool:
        """Return False: there is no run to end."""
        return False

    def publish(self, rank: RankParts, plan: RoundPlan) -> None:
        """Do nothing: no model is written."""
