"""The coordinator without its network: it takes requests, logs events and returns replies.

`Coordinator` owns the run's event log and keys. `check` compares a request with the caller that the
client certificate names. A request that is not allowed raises `Refused` with one line.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.identity import Authority, server_names
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server import replies
from dilocox.coordinator.server.attestations import Attestations
from dilocox.coordinator.server.audit_verdicts import AuditVerdicts
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.checkpoints import Saves
from dilocox.coordinator.server.clocks import Clocks
from dilocox.coordinator.server.departures import Departures
from dilocox.coordinator.server.enrolment_checks import check_admission
from dilocox.coordinator.server.entry_requests import Entries
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.exchange_votes import Exchange
from dilocox.coordinator.server.kv_store import Store
from dilocox.coordinator.server.liveness import Liveness
from dilocox.coordinator.server.name_standing import Standings
from dilocox.coordinator.server.notary import RecordHook, RecordSink
from dilocox.coordinator.server.plan_inputs import sizes_to_log
from dilocox.coordinator.server.refusals import Caller, Refused, ended
from dilocox.coordinator.server.reports import Reports, RunListener
from dilocox.coordinator.server.restore import restored
from dilocox.coordinator.server.resume import resume_point
from dilocox.coordinator.server.run_log import RunLog
from dilocox.coordinator.server.stake_gate import StakeGate, look_command
from dilocox.coordinator.server.startup import RunStart, entered, entry_round, lacking
from dilocox.coordinator.server.tokens import SiteTokens
from dilocox.coordinator.server.topics import TOPICS
from dilocox.coordinator.server.transitions import plan_round
from dilocox.errors import JoinError, TrainingError


class Coordinator:
    """The control plane of one run; its event log is in `folder`."""

    def __init__(
        self,
        config: RunConfig,
        folder: str | Path,
        start: RunStart | None = None,
        listener: RunListener | None = None,
        *,
        notary: RecordSink | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Begin a run, or continue the run whose log and keys are in `folder`.

        `notary` writes the run's record. `now` is a monotonic clock for liveness and `wall` stamps
        events, both in seconds. Raises `TrainingError`, and the errors of `RunStart.earlier`.
        """
        folder, start = Path(folder), start or RunStart()
        self.config, self.timeouts = config, Timeouts.derive(config.network)
        self.wait_for = len(config.sites) if start.wait_for is None else start.wait_for
        if not config.outer.min_sites <= self.wait_for <= len(config.sites):
            raise TrainingError(
                f"wait_for {self.wait_for}: give a number of sites from outer.min_sites = "
                f"{config.outer.min_sites} to the {len(config.sites)} of the run file"
            )
        self.listener = listener or RunListener()
        self.witness = RecordHook(notary)
        self.on_change: Callable[[str], None] = lambda topic: None
        """Called with a topic when waiting requests about this topic should be checked again."""
        self.budgets = Budgets(config.site.exchanging_ranks, now)
        by_stake = config.settlement is not None and config.settlement.admission == "stake"
        look = look_command(config.folder)
        self.stakes = StakeGate(look, self._tell, now=now) if by_stake else None
        self.liveness = Liveness(self.timeouts)
        self.clocks = Clocks(self.timeouts)
        self.arrivals, self.steps = self.clocks.arrivals, self.clocks.steps
        self.log = EventLog(folder)
        try:
            self.state = restored(config, self.log)
            self.run = run = RunLog(
                self.state, self.log, self.wait_for, now, wall,
                self.witness.deciding, self._happened,
            )  # fmt: skip
            self.departures = Departures(run, self.liveness)
            self.standings = Standings(run, self.witness, self.hand_out)
            self.entries = Entries(run, self.budgets)
            self.saves = Saves(run, self.budgets, self.witness, self.resume)
            self.reports = Reports(run, self.budgets, self.listener.on_report)
            self.store = Store(self.state, self._store, self.budgets)
            self.authority = Authority(folder, server_names(config.network))
            self.tokens = SiteTokens(folder, self.authority.fingerprint)
            self.verdicts = AuditVerdicts(run, self.budgets, self.witness, self.tokens, self._tell)
            self.machines = Attestations(self.state, self.budgets, self.witness, self.tokens)
            self._open(start)
        except BaseException:
            self.log.close()
            raise

    def _open(self, start: RunStart) -> None:
        digest = self.config.digest()
        if self.state.digest and self.state.digest != digest:
            raise TrainingError(
                f"{self.log.path}: belongs to a run with another run file, or of an older dilocox; "
                "give this run a folder of its own, or use the run file in that folder"
            )
        if not self.state.digest:
            self.run.append(e.Created(self.run.wall(), digest, self.config.run.name))
        if self.config.control.adapt == "link":
            sizes = sizes_to_log(self.state.payloads, start.payloads)
            if sizes is not None:
                self.run.append(e.Sized(self.run.wall(), sizes))
        if self.config.handover is not None and self.state.steps_before is None:
            if start.earlier is None:
                raise TrainingError(
                    "the run file names a handover, and the coordinator was given no earlier run"
                )
            found = start.earlier()
            self.run.append(e.HandedOver(self.run.wall(), found.name, found.steps, found.ledger))
        for name in self.state.live:
            beaten = self.state.sites[name].role != "enrolled"
            self._expect(name, self.timeouts.reconnect if beaten else self.timeouts.first_beat)
        self.witness.reopened(self.state)
        self.run.follow()

    def resume(self, tick: int | None = None) -> e.Resumed:
        """Continue from the checkpoint at `tick`, or from the latest complete one if it is None.

        All sites have to enrol again. Later events stay in the log but no longer count. Raises
        `CheckpointError` if there is no such checkpoint."""
        event = resume_point(self.config, self.log, self.state, self.run.wall(), tick)
        self.run.append(event)
        self.reports.tell(self.listener.on_resumed, event)
        return event

    def close(self) -> None:
        """Close the event log and release its lock."""
        if self.stakes is not None:
            self.stakes.close()
        self.log.close()

    def _happened(self, event: e.Event, sequence: int, epoch: int) -> None:
        """React to an event that was logged and applied; see `RunLog`."""
        self.witness.happened(self.state, event)
        self.clocks.happened(self.state, event, self.run.now())
        self.budgets.happened(event)
        if isinstance(event, e.Decided):
            replies.report_verdicts(self.state, event, self.reports.hand_on)
        if isinstance(event, e.Enrolled):
            self._expect(event.site, self.timeouts.first_beat)
        if isinstance(event, e.SiteLost | e.StartupRestarted | e.Resumed):
            for site in self.state.with_role("gone"):
                self.liveness.forget(site)
                self.arrivals.forget(site)
        if isinstance(event, e.Planned):
            self.reports.tell(self.listener.on_plan, self.state.plans[event.plan["round"]])
        if isinstance(event, e.Fetching | e.Decided | e.Retried):
            self.on_change(f"key/{event.key}")
        for topic in ("log", *TOPICS.get(type(event), ())):
            self.on_change(topic)
        if self.state.sequence != sequence:
            self.on_change("status")
            for number, _, kind, text in self.state.feed:
                if number > sequence and kind in ("join", "leave", "phase"):
                    self._tell(text)
        if self.state.epoch != epoch:
            self.store.forget_old_epochs()
            self.on_change("store")

    def _tell(self, text: str) -> None:
        """Show a message to the run's operator."""
        self.reports.tell(self.listener.on_message, text)

    def _expect(self, site: str, limit: float) -> None:
        now = self.run.now()
        for rank in self.state.ranks:
            if rank not in self.state.sites[site].finished | self.state.sites[site].left:
                self.liveness.expect((site, *rank), now, limit)

    def _store(self, key: str, value: str | None, site: str) -> None:
        self.run.append(e.Stored(self.run.wall(), key, value, site))

    def expire(self) -> None:
        """Declare sites lost whose ranks stopped beating, and overtake stragglers.

        Call it every `timeouts.beat` seconds."""
        if self.state.over:
            return
        for site, reason in self.liveness.overdue(self.run.now()).items():
            if site in self.state.live:
                incarnation = self.state.sites[site].incarnation
                self.run.append(e.SiteLost(self.run.wall(), site, incarnation, reason, True))
        # Records now what could not be recorded earlier, for example because the disk was full.
        self.witness.tend()
        self.run.follow()
        for straggler in self.clocks.overdue(self.state, self.run.now()):
            self.run.append(e.Overtaken(self.run.wall(), *straggler, entry_round(self.state)))

    # --- authorisation ----------------------------------------------------------------------

    def check(self, caller: Caller, rank: m.RankId) -> None:
        """Raise `Refused` unless `caller` may send requests for `rank` now."""
        if rank.site != caller.site or caller.operator:
            raise Refused(
                "refused", f"site {rank.site}: this certificate speaks for {caller.site} only"
            )
        if (rank.stage, rank.shard) not in self.state.ranks:
            site = self.config.site
            raise Refused(
                "refused", f"{rank}: a site has {site.stages} stages x {site.shards} shards"
            )
        state = self.state.sites.get(rank.site)
        if state is None or state.incarnation != caller.incarnation:
            raise Refused(
                "gone",
                f"site {rank.site}: incarnation {caller.incarnation} was replaced by a newer one; "
                "stop this process",
            )
        if state.role in ("gone", "absent"):
            raise Refused("gone", f"site {rank.site}: gone ({state.reason}); join the run again")

    def check_site(self, caller: Caller) -> None:
        """Raise `Refused` unless `caller` is the operator or a site's current incarnation."""
        if not caller.operator:
            self.check(caller, m.RankId(site=caller.site, stage=0, shard=0))

    def _check_running(self) -> None:
        if self.state.phase in ("stopped", "failed"):
            raise ended(self.state.phase, self.state.reason)
        if not self.state.running:
            raise Refused("conflict", f"the run is {self.state.phase}: nothing to exchange")

    # --- membership -------------------------------------------------------------------------

    def enrol(self, request: m.EnrolRequest) -> m.EnrolReply:
        """Admit a site. Raises `Refused` with the reason if it may not join."""
        check_admission(self.state, self.tokens, request)
        state = self.state.sites[request.site]
        digest = hashlib.sha256(request.csr.encode()).hexdigest()
        if state.role not in ("absent", "gone"):
            # An identical request is a retry after a lost reply: the site gets the reply again.
            if state.request != digest:
                raise Refused(
                    "taken",
                    f"site {request.site}: taken, it is {state.role} already; use another name, or "
                    f"wait {self.timeouts.heartbeat:g} s if its processes have died",
                )
            return self._admission(request.site)
        if self.stakes is not None:
            self.stakes.check(request, self.witness.stake_of(request.site))
        self.budgets.enrol(request.site)
        incarnation = state.incarnation + 1
        try:
            certificate = self.authority.sign(request.csr, request.site, incarnation)
        except JoinError as error:
            raise Refused("join", str(error)) from None
        event = e.Enrolled(
            self.run.wall(), request.site, incarnation, digest, certificate,
            request.versions.named(), request.data_digest, request.record_key or "",
            request.base_digest,
        )  # fmt: skip
        self.witness.enrolled(request, incarnation)
        self.run.append(event)
        return self._admission(request.site)

    def hand_out(self) -> dict[str, str]:
        """Write the token files of all sites that may join. Returns their valid tokens by site."""
        issues = self.state.tokens_in_force
        self.tokens.write(issues)
        return {name: str(self.tokens.of(name, issue)) for name, issue in issues.items()}

    def _admission(self, site: str) -> m.EnrolReply:
        state = self.state.sites[site]
        return m.EnrolReply(
            incarnation=state.incarnation,
            certificate=state.certificate,
            authority=self.authority.pem,
            epoch=replies.epoch(self.state),
            record_run=self.witness.run,
            record_manifest=self.witness.manifest,
        )

    def ready(self, request: m.ReadyRequest) -> m.Done:
        """Record that a rank of an entering site holds the full state."""
        rank = request.rank
        state = self.state.sites[rank.site]
        if state.role == "enrolled":
            raise Refused("conflict", f"{rank}: ready before the run has let its site enter")
        if state.role == "entering" and (rank.stage, rank.shard) not in state.ready:
            self.run.append(e.Ready(self.run.wall(), rank.site, rank.stage, rank.shard))
        return m.Done()

    def beat(self, request: m.BeatRequest) -> m.BeatReply:
        """Note a rank's heartbeat. The reply tells the rank the run's state and its lease."""
        rank, state = request.rank, self.state
        if request.tick > state.lease and state.running:
            raise Refused(
                "conflict",
                f"{rank}: reports slot {request.tick} beyond its lease {state.lease}",
            )
        site = state.sites[rank.site]
        key = (rank.site, rank.stage, rank.shard)
        if site.role != "finished" and key[1:] not in site.finished | site.left:
            self.liveness.beat(
                key, self.run.now(), request.tick, request.slot_seconds, request.building
            )
        enters = entered(state, rank.site, self.run.wall())
        if enters is not None and self.liveness.all_beaten(rank.site):
            self.run.append(enters)
        if state.phase == "running":
            lease = self.liveness.lease(state.lease, state.with_role("active"))
            lease = max(min(lease, state.lease_end), state.nobody_before)
            if lease > state.lease:
                self.run.append(e.Leased(self.run.wall(), lease))
        return replies.beat_reply(state, rank.site)

    # --- plans ------------------------------------------------------------------------------

    def plan(self, round_: int, caller: Caller) -> m.PlanReply:
        """Return a round's plan. If an active site asks and the plan may be made, make it now."""
        state = self.state
        asking = state.sites.get(caller.site)
        if asking is not None and asking.leaves_before(round_):
            return m.PlanReply(plan=None, waiting_for="", leave=True)
        if asking is not None and (lacks := lacking(state, asking.name, round_, self.run.wall())):
            self.run.append(lacks)
        if round_ in state.plans:
            self.witness.settle()
            self.steps.told(caller.site, round_, self.run.now())
            receive = asking is not None and asking.role == "entering"
            return m.PlanReply(plan=state.plans[round_], waiting_for="", receive=receive)
        if state.over:
            raise ended(state.phase, state.reason)
        if round_ < state.first_round or state.flush_planned:
            raise Refused(
                "conflict",
                f"round {round_}: this run goes on from round {state.first_round} and ends with "
                f"the flush after {state.last_step} inner steps",
            )
        planned = plan_round(state, round_, self.run.wall())
        if isinstance(planned, e.Planned) and state.may_plan(caller.site, round_):
            self.run.append(self.clocks.planned(state, planned, self.run.append))
            self.witness.settle()
            self.steps.told(caller.site, round_, self.run.now())
            return m.PlanReply(plan=state.plans[round_], waiting_for="")
        waiting = planned if isinstance(planned, str) else "an active site to ask for it"
        return m.PlanReply(plan=None, waiting_for=waiting)

    def round_done(self, request: m.RoundDoneRequest) -> m.Done:
        """Record that a rank has finished a round."""
        rank, round_ = request.rank, request.round
        site = self.state.sites[rank.site]
        if round_ < site.rounds_done:
            return m.Done()
        if not self.state.takes_part(rank.site, round_) and not site.is_behind(round_):
            raise Refused("conflict", f"{rank}: round {round_} was not planned for it")
        if (rank.stage, rank.shard) not in site.done.get(round_, ()):
            event = e.RoundDone(
                self.run.wall(), rank.site, rank.stage, rank.shard, round_,
                None if request.measured is None else request.measured.model_dump(mode="json"),
            )  # fmt: skip
            self.steps.done(rank.site, round_, self.run.now())
            self.run.append(event)
        return m.Done()

    # --- exchange ---------------------------------------------------------------------------

    def begin(self, request: m.BeginRequest) -> m.BeginReply:
        """Begin an exchange in the current epoch, or return the group of one that has begun.

        The reply names the ranks that must be present, or commit, before payloads are sent."""
        self._check_running()
        key = m.ExchangeKey.parse(request.key)
        if key.stage != request.rank.stage:
            raise Refused("conflict", f"{request.rank}: begins an exchange of stage {key.stage}")
        exchange = self.state.exchanges.get(request.key)
        if exchange is None:
            if key.round not in self.state.plans or not self._fresh(key.round):
                raise Refused(
                    "conflict", f"exchange {request.key}: round {key.round} is not in progress"
                )
            if (reason := self.state.unplanned(key)) is not None:
                raise Refused("conflict", f"exchange {request.key}: {reason}")
            if self.state.sites[request.rank.site].role not in ("entering", "active"):
                raise Refused("conflict", f"{request.rank}: its site has not entered yet")
            self.run.append(e.Pinned(self.run.wall(), request.key), request.key)
            exchange = self.state.exchanges[request.key]
            self.arrivals.keep(self.state.exchanges)
        news = self.witness.committing(self.state, exchange, request)
        rank = request.rank
        if self.witness.is_there(request):
            news |= self.arrivals.note(request.key, rank.site, rank.shard, self.run.now())
            self.steps.arrived(request.key, (rank.site, rank.stage, rank.shard), self.run.now())
        if news:
            self.on_change(f"key/{request.key}")
        return self.begun(request)

    def begun(self, request: m.BeginRequest) -> m.BeginReply:
        """Return epoch and group of an exchange that has begun, and the ranks that it waits for."""
        self._check_running()
        exchange = self.state.exchanges.get(request.key)
        if exchange is None:
            raise Refused("conflict", f"exchange {request.key}: not in progress any more")
        present = self.arrivals.present(request.key)
        awaited = self.witness.awaited(self.state, exchange, request, present)
        if exchange.decision is not None:
            self.witness.settle()
        return replies.begin_reply(self.state, exchange, awaited)

    def _fresh(self, round_: int) -> bool:
        """Return whether the state still holds all exchange decisions of this round."""
        return round_ >= self.state.next_round - 1 - replies.REMEMBERED

    def vote(self, request: m.VoteRequest) -> m.VoteReply:
        """Count a vote or a broken attempt, and return the decision so far."""
        self._check_running()
        exchange = self._exchange(request)
        rank = request.rank
        voter = (rank.site, rank.stage, rank.shard)
        behind = self.state.sites[rank.site].is_behind(exchange.round)
        if exchange.decision is None and not request.observer and not behind:
            # An entering rank does not vote, but may report a broken link: the link has to work, or
            # its site is dropped.
            receives = request.broken and rank.site in dict(exchange.members)
            if voter not in self.state.voters(exchange) and not receives:
                raise Refused("conflict", f"{rank}: does not vote on exchange {request.key}")
            if request.broken:
                self._broke(request, exchange)
            elif request.attempt == exchange.attempt:
                self._count(request, exchange)
        return self.verdict(request)

    def _broke(self, request: m.VoteRequest, exchange: Exchange) -> None:
        rank = request.rank
        known = exchange.broken.get(request.attempt)
        # An earlier attempt that ended for another reason, such as a lost site, needs no report.
        if known is None and request.attempt != exchange.attempt:
            return
        if known is not None and (rank.site, rank.stage, rank.shard) in known:
            return
        held_up = self.state.held_up(exchange) - {rank.site}
        event = e.Broke(
            self.run.wall(), rank.site, rank.stage, rank.shard, request.key, request.attempt,
            [name for name in request.failed if name not in held_up],
            [name for name in request.failed if name in held_up],
        )  # fmt: skip
        self.run.append(event, request.key)

    def _count(self, request: m.VoteRequest, exchange: Exchange) -> None:
        rank = request.rank
        phase = exchange.phase_to_count((rank.site, rank.stage, rank.shard), request.phase)
        if phase is None:
            return
        request = request.model_copy(update={"phase": phase})
        if phase == "done" and exchange.averaging is None:
            raise Refused("conflict", f"{rank}: done with {request.key} before its set was fixed")
        event = e.Voted(
            self.run.wall(), rank.site, rank.stage, rank.shard, request.key, request.attempt,
            request.phase, list(request.held), request.contributes,
            request.digests.get(rank.site),
            {site: own.model_dump(exclude_defaults=True) for site, own in request.opinions.items()},
            self.witness.voting(self.state, exchange, request),
            self.witness.recommitted(self.state, exchange, request),
        )  # fmt: skip
        self.run.append(event, request.key)

    def _exchange(self, request: m.VoteRequest) -> Exchange:
        exchange = self.state.exchanges.get(request.key)
        if exchange is None or exchange.stage != request.rank.stage:
            raise Refused("conflict", f"exchange {request.key}: not begun by this stage; begin it")
        if not 1 <= request.attempt <= exchange.attempt:
            raise Refused(
                "conflict", f"exchange {request.key}: there is no attempt {request.attempt} yet"
            )
        return exchange

    def verdict(self, request: m.VoteRequest) -> m.VoteReply:
        """Return the decision for a vote that has been counted."""
        self._check_running()
        reply = replies.vote_reply(self.state, self._exchange(request), request)
        if reply.decision != "wait":
            self.witness.settle()
        if reply.decision == "commit":
            return reply.model_copy(update={"late": self.arrivals.late(request.key)})
        return reply

    # --- reports ------------------------------------------------------------

    def report(self, request: m.ReportRequest) -> m.ReportReply:
        """Take a site's metrics of a round."""
        return self.reports.take(request)
