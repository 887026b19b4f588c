"""Requests of ranks about checkpoints: written, damaged, and signed model states."""

from __future__ import annotations

from collections.abc import Callable

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.custody_messages import CustodyReply, CustodyRequest
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.notary import RecordHook
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.run_log import RunLog
from dilocox.coordinator.server.startup import goes_on
from dilocox.coordinator.server.transitions import writers
from dilocox.errors import CheckpointError


class Saves:
    """Handles requests about checkpoints. A request that is not allowed raises `Refused`."""

    def __init__(
        self, run: RunLog, budgets: Budgets, witness: RecordHook, resume: Callable[[], object]
    ) -> None:
        """`resume` resumes the run from the latest complete checkpoint; it may raise
        `CheckpointError`."""
        self._run, self._budgets, self._witness = run, budgets, witness
        self._resume = resume

    def wrote(self, request: m.CheckpointRequest) -> m.Done:
        """Record that a rank's part of a checkpoint is on disk."""
        run, rank, state = self._run, request.rank, self._run.state
        known = state.checkpoints.get(request.tick)
        if not state.lies_at(request.tick, request.round, request.slot):
            raise Refused(
                "conflict",
                f"checkpoint at slot {request.tick}: {rank} places it in round {request.round} "
                f"slot {request.slot}, where no plan has it",
            )
        if state.sites[rank.site].is_behind(request.round):
            return m.Done()  # The overtaken site takes no part in this checkpoint.
        if rank.site not in writers(state, request.round):
            raise Refused("conflict", f"{rank}: writes no checkpoint in round {request.round}")
        if known is None or (rank.site, rank.stage, rank.shard) not in known.written:
            self._budgets.spend(rank.site, "checkpoints")
            event = e.CheckpointWritten(
                run.wall(), rank.site, rank.stage, rank.shard, request.tick, request.round,
                request.slot, dict(request.digests),
            )  # fmt: skip
            run.append(event)
        return m.Done()

    def state(self, request: m.StateRequest) -> m.Done:
        """Record a rank's signed statement of its model state."""
        self._budgets.spend(request.rank.site, "signed states")
        return self._witness.state(request)

    def custody(self, request: CustodyRequest) -> CustodyReply:
        """Record a rank's signed custody of its pieces."""
        # A budget of its own: many rounds that are signed late must not keep states from the log.
        self._budgets.spend(request.rank.site, "signed pieces")
        return self._witness.custody(request)

    def spoiled(self, request: m.SpoiledRequest) -> m.Done:
        """Resume from an earlier checkpoint, because the founder's part of this one is damaged.

        Only the founder may report this, because the other sites fetch its state. If it reports
        damage a second time and at least two others have their parts, the founder is lost instead.
        """
        run, rank, state = self._run, request.rank, self._run.state
        if state.phase != "starting" or request.tick not in state.checkpoints:
            raise Refused("conflict", f"{rank}: no site resumes from slot {request.tick} now")
        if rank.site != state.founder:
            raise Refused(
                "conflict",
                f"{rank}: no other site takes state from its checkpoint; fetch the state from "
                f"{state.founder}",
            )
        if state.sites[rank.site].spoiled and len(self._whole_beside(rank.site)) > 1:
            # One site must not set the run back repeatedly: it enters later from another site.
            reason = f"its part of the checkpoint at slot {request.tick} is damaged, too"
            incarnation = state.sites[rank.site].incarnation
            run.append(e.SiteLost(run.wall(), rank.site, incarnation, reason, True))
            return m.Done()
        run.append(
            e.CheckpointCorrupt(
                run.wall(), rank.site, rank.stage, rank.shard, request.tick, request.reason
            )
        )
        try:
            self._resume()
        except CheckpointError as error:
            run.append(e.Ended(run.wall(), "failed", str(error)))
        return m.Done()

    def _whole_beside(self, site: str) -> list[str]:
        """Return the other starting sites that have their part of the checkpoint."""
        state = self._run.state
        return [name for name in state.starters if name != site and goes_on(state, name)]
