"""Requests by which sites leave and runs end."""

from __future__ import annotations

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.liveness import LEASE_LEAST, Liveness
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.run_log import RunLog
from dilocox.coordinator.server.stranded import while_waiting


class Departures:
    """Handles requests to leave, retire, depart, stop, fail and finish.

    A request that is not allowed raises `Refused` with one line.
    """

    def __init__(self, run: RunLog, liveness: Liveness) -> None:
        self._run, self._liveness = run, liveness

    def leave(self, request: m.LeaveRequest) -> m.Done:
        """Let a site leave at once; its open token ranges are issued again."""
        run = self._run
        site = run.state.sites[request.rank.site]
        if site.role != "finished" and not run.state.over:
            run.append(
                e.SiteLost(run.wall(), site.name, site.incarnation, request.reason, request.failed)
            )
        return m.Done()

    def retire(self, request: m.RetireRequest, caller: Caller) -> m.RetireReply:
        """Let a site leave after the rounds that are planned for it.

        The operator may ask this of any site, a site only of itself. If the only active site is to
        leave, the run stops with a checkpoint instead.
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
            # Its open exchanges are decided only when more sites come, so it cannot finish them.
            reason = f"{request.reason}, while the run waits for sites"
            run.append(e.SiteLost(run.wall(), name, site.incarnation, reason, False))
            return m.RetireReply(text=f"site {name} is out of the run, which waits for sites")
        if site.leave_round is None:
            event = e.Leaving(run.wall(), name, site.incarnation, state.next_round, request.reason)
            run.append(event)
        return m.RetireReply(
            text=f"site {name} leaves before round {site.leave_round}, after finishing all earlier "
            "rounds"
        )

    def depart(self, request: m.DepartRequest) -> m.Done:
        """Record that a rank of a leaving site has finished all of its exchanges."""
        run, rank = self._run, request.rank
        site = run.state.sites[rank.site]
        if site.leave_round is None:
            raise Refused("conflict", f"{rank}: its site was not asked to leave")
        if (rank.stage, rank.shard) not in site.left:
            self._liveness.forget(rank.site, (rank.stage, rank.shard))
            run.append(e.RankLeft(run.wall(), rank.site, rank.stage, rank.shard))
        return m.Done()

    def stop(self, request: m.StopRequest, caller: Caller | None = None) -> m.StopReply:
        """Stop the run at the end of the lease, the highest slot that a rank may already reach.

        The event names a site that asks for the stop. A run that waits for sites ends at once: no
        exchange is decided, so the sites cannot reach a common slot end for a checkpoint.
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
        """End the run as failed."""
        run = self._run
        if not run.state.over:
            reason = f"{request.rank}: {request.reason}"
            run.append(e.Ended(run.wall(), "failed", reason))
        return m.Done()

    def finish(self, request: m.FinishRequest) -> m.Done:
        """Record that a rank is done. A site that is not active yet leaves the run."""
        run, rank = self._run, request.rank
        site = run.state.sites[rank.site]
        if site.role == "active" and (rank.stage, rank.shard) not in site.finished:
            self._liveness.forget(rank.site, (rank.stage, rank.shard))
            run.append(e.Finished(run.wall(), rank.site, rank.stage, rank.shard, request.complete))
        elif site.role in ("enrolled", "entering") and not run.state.over:
            reason = "finished before it had entered"
            run.append(e.SiteLost(run.wall(), site.name, site.incarnation, reason, False))
        return m.Done()
