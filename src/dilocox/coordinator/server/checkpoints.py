"""What ranks say of their checkpoints: the requests of `Coordinator` about them."""

from __future__ import annotations

from collections.abc import Callable

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.notary import RecordHook
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.run_log import RunLog
from dilocox.coordinator.server.startup import goes_on
from dilocox.coordinator.server.transitions import writers
from dilocox.errors import CheckpointError


class Saves:
    """Checkpoints that were written, and that are damaged. Raises `Refused` with one line."""

    def __init__(
        self, run: RunLog, budgets: Budgets, witness: RecordHook, resume: Callable[[], object]
    ) -> None:
        """`resume`: goes back to the latest complete checkpoint. Raises `CheckpointError`."""
        self._run, self._budgets, self._witness = run, budgets, witness
        self._resume = resume

    def wrote(self, request: m.CheckpointRequest) -> m.Done:
        """A rank's part of a checkpoint is on disk."""
        run, rank, state = self._run, request.rank, self._run.state
        known = state.checkpoints.get(request.tick)
        if not state.lies_at(request.tick, request.round, request.slot):
            raise Refused(
                "conflict",
                f"checkpoint at slot {request.tick}: {rank} places it in round {request.round} "
                f"slot {request.slot}, where no plan has it",
            )
        if state.sites[rank.site].is_behind(request.round):
            return m.Done()  # a checkpoint that it takes no part in
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
        """A rank has signed what model state it holds."""
        self._budgets.spend(request.rank.site, "signed states")
        return self._witness.state(request)

    def spoiled(self, request: m.SpoiledRequest) -> m.Done:
        """The checkpoint that the run was to go on from is damaged at the site that the others
        would fetch from: back to the one before. A site that says so twice goes, if two others or
        more have their parts."""
        run, rank, state = self._run, request.rank, self._run.state
        if state.phase != "starting" or request.tick not in state.checkpoints:
            raise Refused("conflict", f"{rank}: nobody goes on from slot {request.tick} now")
        if rank.site != state.founder:
            raise Refused(
                "conflict",
                f"{rank}: the others take nothing of its checkpoint; fetch the state from "
                f"{state.founder}",
            )
        if state.sites[rank.site].spoiled and len(self._whole_beside(rank.site)) > 1:
            # One site does not send the run back again and again: it comes in from another.
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
        """Other sites that begin, and that have their part of the checkpoint."""
        state = self._run.state
        return [name for name in state.starters if name != site and goes_on(state, name)]
