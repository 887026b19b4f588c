"""How sites go and runs end: the requests of `Coordinator` that say so."""

from __future__ import annotations

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.liveness import LEASE_LEAST, Liveness
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.run_log import RunLog
from dilocox.coordinator.server.stranded import while_waiting


class Departures:
    """Leaving, retiring, finishing, stopping and failing. Raises `Refused` with one line."""

    def __init__(self, run: RunLog, liveness: Liveness) -> None:
        self._run, self._liveness = run, liveness

    def leave(self, request: m.LeaveRequest) -> m.Done:
        """A site goes at once; what it was to train on is given out again."""
        run = self._run
        site = run.state.sites[request.rank.site]
        if site.role != "finished" and not run.state.over:
            run.append(
                e.SiteLost(run.wall(), site.name, site.incarnation, request.reason, request.failed)
            )
        return m.Done()

    def retire(self, request: m.RetireRequest, caller: Caller) -> m.RetireReply:
        """A site goes when it is through with the rounds that are planned for it.

        The operator may say so of any site, a site of itself. The only active site cannot go
        without the run: then the run stops, with a checkpoint.
        """
        run, state, name = self._run, self._run.state, request.site
        if not caller.operator and caller.site != name:
            raise Refused("refused", f"site {name}: only itself or the operator may retire it")
        if name not in state.sites:
            known = ", ".join(state.sites)
            raise Refused("refused", f"site {name}: not in the run file, which names: {known}")
        if state.over:
            raise Refused("ended", f"run {state.phase}: {state.reason or 'complete'}")
        site = state.sites[name]
        if site.role in ("absent", "gone", "finished"):
            raise Refused("conflict", f"site {name}: is not in the run now (it is {site.role})")
        if request.now or site.role != "active":
            run.append(e.SiteLost(run.wall(), name, site.incarnation, request.reason, False))
            return m.RetireReply(text=f"site {name} is out of the run")
        if not [other for other in state.staying(state.next_round) if other != name]:
            self.stop(m.StopRequest(reason=f"{name}, the only active site, is to leave"))
            return m.RetireReply(
                text=f"site {name} is the only active one: the run stops with a checkpoint"
            )
        if state.waits_for_sites:
            # What it owes the others is decided only when more sites are there.
            reason = f"{request.reason}, while the run waits for sites"
            run.append(e.SiteLost(run.wall(), name, site.incarnation, reason, False))
            return m.RetireReply(text=f"site {name} is out of the run, which waits for sites")
        if site.leave_round is None:
            event = e.Leaving(run.wall(), name, site.incarnation, state.next_round, request.reason)
            run.append(event)
        return m.RetireReply(
            text=f"site {name} leaves before round {site.leave_round}, with all before that done"
        )

    def depart(self, request: m.DepartRequest) -> m.Done:
        """A rank of a leaving site owes the run nothing any more."""
        run, rank = self._run, request.rank
        site = run.state.sites[rank.site]
        if site.leave_round is None:
            raise Refused("conflict", f"{rank}: nobody has asked its site to leave")
        if (rank.stage, rank.shard) not in site.left:
            self._liveness.forget(rank.site, (rank.stage, rank.shard))
            run.append(e.RankLeft(run.wall(), rank.site, rank.stage, rank.shard))
        return m.Done()

    def stop(self, request: m.StopRequest, caller: Caller | None = None) -> m.StopReply:
        """End the run at the highest slot that anyone may have been allowed to reach. A site that
        asks for it is named.

        A run that waits for sites ends where it is: no exchange is decided, so no site can get to a
        slot end where all could write a checkpoint.
        """
        run, state = self._run, self._run.state
        site = "" if caller is None or caller.operator else caller.site
        if state.phase in ("enrolling", "starting"):
            run.append(e.Ended(run.wall(), "stopped", request.reason, site))
        elif state.waits_for_sites:
            reason = while_waiting(state, request.reason)
            run.append(e.Ended(run.wall(), "stopped", reason, site))
        elif state.phase == "running":
            tick = max(state.lease, state.first_tick + LEASE_LEAST)
            run.append(e.Stopping(run.wall(), tick, request.reason, site))
        return m.StopReply(stop_tick=state.lease if state.stop_tick is None else state.stop_tick)

    def fail(self, request: m.FailRequest) -> m.Done:
        """The run cannot go on."""
        run = self._run
        if not run.state.over:
            reason = f"{request.rank}: {request.reason}"
            run.append(e.Ended(run.wall(), "failed", reason))
        return m.Done()

    def finish(self, request: m.FinishRequest) -> m.Done:
        """A rank is done."""
        run, rank = self._run, request.rank
        site = run.state.sites[rank.site]
        if site.role == "active" and (rank.stage, rank.shard) not in site.finished:
            self._liveness.forget(rank.site, (rank.stage, rank.shard))
            run.append(e.Finished(run.wall(), rank.site, rank.stage, rank.shard, request.complete))
        elif site.role in ("enrolled", "entering") and not run.state.over:
            reason = "finished before it had entered"
            run.append(e.SiteLost(run.wall(), site.name, site.incarnation, reason, False))
        return m.Done()
