"""The state of a run: the result of applying all events of its log. Replay gives the same state.

`CoordinatorState.apply` only records an event; `transitions` decides which event follows a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dilocox.coordinator.controller.pace import MOST_ROUNDS
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import Measured, RoundPlan
from dilocox.coordinator.protocol.verdicts import Fetch, RankOpinion
from dilocox.coordinator.server import doubts, early_end, pace_lines, payload_fetches
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.exchange_votes import UNREACHABLE, Exchange, Member, Vote
from dilocox.coordinator.server.given_state import GivenState
from dilocox.coordinator.server.ledger import Ledger
from dilocox.coordinator.server.site_state import CheckpointState, enrolled, stand

REMEMBERED = 4
"""Number of rounds before the newest plan whose decisions are kept; older ones are in the log."""
SAY_AGAIN = 10
"""Rounds without a clock correction of a site after which the next one is announced again."""

CHECKPOINTS = 32
"""Least number of complete checkpoints in the state; sites keep `checkpoint.keep` on disk."""


class CoordinatorState(GivenState):
    """The full state of the coordinator, changed only by `apply`."""

    def apply(self, event: e.Event) -> None:
        """Change the state by one event."""
        _APPLY[type(event)](self, event)

    def _new_epoch(self) -> None:
        self.epoch += 1
        live = self.with_role("entering", "active")
        self.members = [(name, self.sites[name].incarnation) for name in live]

    def _created(self, event: e.Created) -> None:
        self.digest = event.digest

    def _enrolled(self, event: e.Enrolled) -> None:
        self.sites[event.site] = enrolled(self.sites[event.site], event)
        if self.running:
            # The previous incarnation may have measured on another machine.
            for sites in self.measured.values():
                sites.pop(event.site, None)
        if self.versions is None:
            self.versions = dict(event.versions)
        if self.data_digest is None:
            self.data_digest = event.data_digest
        if self.base_digest is None:
            self.base_digest = event.base_digest
        again = f" again (incarnation {event.incarnation})" if event.incarnation > 1 else ""
        if self.sites[event.site].standing.bind(event.key):
            again += ", with another key than before"
        self._say(event, "join", f"{event.site} enrolled{again}")

    def _started(self, event: e.Started) -> None:
        self.phase, self.founder, self.starters = "starting", event.founder, list(event.sites)
        for name in event.sites:
            self.sites[name].role = "entering"
            self.sites[name].donor = None if name == event.founder else event.founder
            from_round = self.first_round if event.from_round is None else event.from_round
            self.sites[name].from_round = from_round
        self._new_epoch()
        self._say(event, "phase", f"starting with {', '.join(event.sites)}")
        if len(event.sites) == 2:
            self._say(event, "phase", doubts.NO_MAJORITY)

    def _entered(self, event: e.Entered) -> None:
        self._enter(event)
        if event.starts:
            self.starters = [n for n in self.sites if n in (*self.starters, event.site)]
        self._new_epoch()
        self._say(event, "join", f"{event.site} enters, fetching from {event.donor}")

    def _enter(self, event: e.Entered | e.Overtaken) -> None:
        site = self.sites[event.site]
        site.role, site.donor, site.ready, site.tried = "entering", event.donor, set(), set()
        # The site met its donors through these keys when it entered before.
        self._forget_keys(f"run/entry/{event.site}/")
        if event.from_round is not None:
            site.from_round = event.from_round
            return
        begun = (exchange.round for exchange in self.exchanges.values())
        site.from_round = max(begun, default=self.first_round - 1) + 1

    def _lacking(self, event: e.CheckpointMissing) -> None:
        site = self.sites[event.site]
        site.lacks = True
        self.starters = [name for name in self.starters if name != event.site]
        self._say(
            event,
            "join",
            f"{event.site} has no part of the checkpoint: it enters from {site.donor}",
        )

    def _regathered(self, event: e.StartupRestarted) -> None:
        for name in event.sites:
            self._let_go(name, "the start begins anew")
        self.phase, self.founder, self.starters = "enrolling", None, []
        self._new_epoch()
        self._say(event, "phase", "nobody is left to start from: waiting for sites to join again")

    def _overtaken(self, event: e.Overtaken) -> None:
        self._enter(event)
        fetches = (each for key in self.undecided for each in self.exchanges[key].fetches)
        told = {each.sender for each in fetches if each.site == event.site}
        self._without((event.site, event.incarnation))
        self._say(event, "leave", f"{event.site} is left behind: {event.reason}")
        lacks = [sender for sender in event.lacks if sender not in told]
        for text in doubts.of_lacking(self.doubts, event.site, lacks):
            self._say(event, "phase", text)

    def _ready(self, event: e.Ready) -> None:
        self.sites[event.site].ready.add((event.stage, event.shard))

    def _activated(self, event: e.Activated) -> None:
        for name, round_ in event.rounds.items():
            site = self.sites[name]
            # theta_0 comes from the founder, not from a donor.
            site.entered_from = None if self.phase == "starting" else site.donor
            site.role, site.donor, site.spoiled = "active", None, False
            site.active_from = site.rounds_done = round_
            if self.phase != "starting":
                # Ranges planned before the site was overtaken, on which it has not trained.
                self.ledger.give_back(name, site.incarnation)
            else:
                # After a resume the site takes part in recorded exchanges that are in flight, too.
                if event.since is not None:
                    site.active_from = event.since[name]
                else:
                    while name in self._members_of(site.active_from - 1):
                        site.active_from -= 1
                if name in self._members_of(round_):
                    self.ledger.adopt(name, site.incarnation)
            self._say(event, "join", f"{name} contributes from round {round_} on")
        if self.phase == "starting":
            self.phase = "running"
            # After a resume, ranges of sites that have not come back are given to the others.
            for name, incarnation in self.ledger.holders:
                if self.sites[name].role != "active" or self.sites[name].incarnation != incarnation:
                    self.ledger.give_back(name, incarnation)
            self._say(event, "phase", "running")
        self._forget_shown()
        # No new epoch, because the members are the same.

    def _members_of(self, round_: int) -> dict[str, Any]:
        return dict(self.plans[round_].members) if round_ in self.plans else {}

    def _gone(self, event: e.SiteLost) -> None:
        member = (event.site, event.incarnation)
        if event.donor is not None:
            self.sites[event.site].distrusts.add(event.donor)
        self._let_go(event.site, event.reason)
        if not event.reason.startswith(f"{UNREACHABLE}:"):
            # The site has died or left, so broken links with it are no evidence against others.
            self.sites[event.site].disputes.clear()
            for site in self.sites.values():
                site.disputes.pop(event.site, None)
        self.ledger.give_back(*member)
        self.starters = [name for name in self.starters if name != event.site]
        self._say(event, "leave", f"{event.site} is gone: {event.reason}")
        if self.waits_for_sites:
            active, least = len(self.with_role("active")), self.config.outer.min_sites
            text = f"the run waits for sites: outer.min_sites is {least}, active now: {active}"
            self._say(event, "leave", text)
        self._forget_shown()
        if member in self.members:
            self._without(member)

    def _let_go(self, name: str, reason: str) -> None:
        site = self.sites[name]
        site.role, site.reason, site.donor = "gone", reason, None
        self._forget_keys(f"site/{name}/")

    def _forget_keys(self, prefix: str) -> None:
        self.store = {key: value for key, value in self.store.items() if not key.startswith(prefix)}
        self.owners = {key: site for key, site in self.owners.items() if key in self.store}

    def _without(self, member: Member) -> None:
        self._new_epoch()
        for key in self.undecided:
            exchange = self.exchanges[key]
            if member in exchange.members:
                exchange.repin(self.epoch, self.members_for(exchange.round))
                exchange.broken = {}
        self._new_donors(member[0])

    def _leaving(self, event: e.Leaving) -> None:
        self.sites[event.site].leave_round = event.round
        self._say(event, "leave", f"{event.site} leaves before round {event.round}: {event.reason}")

    def _stood(self, event: e.Banned | e.Unbanned | e.KeyForgotten) -> None:
        self._say(event, *stand(self.sites[event.site], event))

    def _left(self, event: e.RankLeft) -> None:
        self.sites[event.site].left.add((event.stage, event.shard))

    def _new_donors(self, gone: str) -> None:
        if self.phase == "starting" and self.founder == gone:
            whole = [name for name in self.starters if self.is_ready(name)]
            self.founder = next(iter([*whole, *self.starters]), None)
            for name in self.starters:
                site = self.sites[name]
                site.donor = None if name == self.founder else self.founder
                # Parts from two founders would not form one state, so what came from the old one is
                # discarded. State from a checkpoint is the same at all sites and stays.
                if name not in whole and self.checkpoint is None:
                    site.ready = set()
            return
        for site in self.sites.values():
            if site.role == "entering" and site.donor == gone:
                site.donor = self.donor_for(site.name) or self.founder

    def _planned(self, event: e.Planned) -> None:
        plan = RoundPlan.model_validate(event.plan)
        self.plans[plan.round] = plan
        self.next_round = plan.round + 1
        for name, member in plan.members.items():
            self.ledger.issue(
                name, self.sites[name].incarnation, plan.round, member.space, member.ranges
            )
        self._forget(plan.round - REMEMBERED)
        self._forget_shown(REMEMBERED)
        oldest = plan.round - max(self.config.control.window, MOST_ROUNDS) - REMEMBERED
        self.measured = {r: sites for r, sites in self.measured.items() if r >= oldest}
        self.plans = {r: known for r, known in self.plans.items() if r >= oldest}
        what = "flush" if plan.kind == "flush" else f"round {plan.round}"
        self._say(event, "plan", f"{what} planned for {', '.join(plan.members)}")
        for line in pace_lines.changes(plan, self.plans.get(plan.round - 1)):
            self._say(event, "phase", line)

    def _forget(self, oldest: int) -> None:
        for key in [key for key, item in self.exchanges.items() if item.round < oldest]:
            del self.exchanges[key]
            self.undecided.pop(key, None)

    def _sized(self, event: e.Sized) -> None:
        self.payloads = event.payloads

    def _handed_over(self, event: e.HandedOver) -> None:
        self.steps_before = event.steps
        self.ledger = Ledger.from_json(event.ledger, self.ledger.until)

    def _round_done(self, event: e.RoundDone) -> None:
        site = self.sites[event.site]
        if event.measured is not None:
            measured = Measured.model_validate(event.measured)
            self.measured.setdefault(event.round, {})[event.site] = measured
        ranks = site.done.setdefault(event.round, set())
        ranks.add((event.stage, event.shard))
        if len(ranks) == self.config.site.exchanging_ranks:
            del site.done[event.round]
            site.rounds_done = max(site.rounds_done, event.round + 1)
            self.ledger.settle(event.round + 1, [event.site])
            self.sequence += 1

    def _clocked(self, event: e.Clocked) -> None:
        site, known = self.sites[event.site], self.measured[event.round]
        said = known[event.site].step_us
        known[event.site] = known[event.site].model_copy(update={"step_us": event.step_us})
        if site.clocked is None or event.round > site.clocked + SAY_AGAIN:
            self._say(
                event,
                "phase",
                f"{event.site} says that an inner step of round {event.round} took it "
                f"{said / 1000:g} ms; by the coordinator's clock it took {event.step_us / 1000:g} "
                "ms, and that counts",
            )
        site.clocked = event.round

    def _pinned(self, event: e.Pinned) -> None:
        key = ExchangeKey.parse(event.key)
        self.exchanges[event.key] = Exchange(
            event.key, key.round, key.stage, self.epoch, self.members_for(key.round)
        )
        self.undecided[event.key] = None

    def _voted(self, event: e.Voted) -> None:
        exchange = self.exchanges[event.key]
        rank = (event.site, event.stage, event.shard)
        if event.phase == "done":
            exchange.done.add(rank)
        elif event.phase == "fetched":
            exchange.fetched.add(rank)
            if any(
                (each.site, each.shard) == (event.site, event.shard) for each in exchange.fetches
            ):
                vote = exchange.votes[rank]
                vote.held, vote.opinions = list(event.held), _opinions(event)
        else:
            exchange.votes[rank] = Vote(
                list(event.held), event.contributes, event.digest, _opinions(event),
                event.committed, event.recommitted,
            )  # fmt: skip

    def _fetching(self, event: e.Fetching) -> None:
        exchange = self.exchanges[event.key]
        exchange.fetches = [Fetch.model_validate(each) for each in event.fetches]
        self._say(event, "decision", payload_fetches.line(exchange.fetches, event.key))
        lacks: dict[str, list[str]] = {}
        for each in exchange.fetches:
            if each.sender not in lacks.setdefault(each.site, []):
                lacks[each.site].append(each.sender)
        for site, senders in lacks.items():
            for text in doubts.of_lacking(self.doubts, site, senders):
                self._say(event, "phase", text)

    def _broke(self, event: e.Broke) -> None:
        reports = self.exchanges[event.key].broken.setdefault(event.attempt, {})
        if event.excused and not event.failed:
            self.exchanges[event.key].excused.add(event.attempt)
        else:
            self.exchanges[event.key].excused.discard(event.attempt)
        reports[event.site, event.stage, event.shard] = list(event.failed)
        round_ = self.exchanges[event.key].round
        for name in event.failed:
            if name in self.sites and name != event.site:
                self.sites[name].disputes[event.site] = round_
                self.sites[event.site].disputes[name] = round_

    def _retried(self, event: e.Retried) -> None:
        exchange = self.exchanges[event.key]
        # Only the first broken exchange of an epoch starts a new one; the others move to that.
        if exchange.epoch == self.epoch:
            self._new_epoch()
        exchange.repin(self.epoch, self.members_for(exchange.round))
        self._say(event, "decision", f"exchange {event.key} begins attempt {exchange.attempt}")

    def _decided(self, event: e.Decided) -> None:
        exchange = self.exchanges[event.key]
        exchange.note(event.verdicts, event.shares)
        if event.decision == "average":
            exchange.averaging = list(event.set)
            return
        exchange.decision = list(event.set)
        exchange.usual_before = self.usual.get(exchange.place)
        self.usual[exchange.place] = event.usual
        voters, members = self.voters(exchange), list(self.plans[exchange.round].members)
        for text in doubts.of_decided(self.doubts, exchange, voters, members):
            self._say(event, "phase", text)
        exchange.votes, exchange.done, exchange.broken = {}, set(), {}
        self.undecided.pop(event.key, None)
        left_out = [name for name in self.plans[exchange.round].members if name not in event.set]
        if left_out:
            self._say(event, "decision", f"exchange {event.key} without {', '.join(left_out)}")

    def _leased(self, event: e.Leased) -> None:
        self.lease = event.tick

    def _ending_early(self, event: e.EndingEarly) -> None:
        self.ends_early = event.reason
        self._say(event, "phase", f"the run ends early, after the rounds planned: {event.reason}")

    def _stopping(self, event: e.Stopping) -> None:
        self.phase, self.reason = "stopping", event.reason
        self.stop_tick = self.lease = event.tick
        self._say(event, "phase", event.line)

    def _wrote(self, event: e.CheckpointWritten) -> None:
        if event.tick not in self.checkpoints:
            for text in doubts.of_unwritten(self.doubts, *self.unwritten(event.tick)):
                self._say(event, "phase", text)
        checkpoint = self.checkpoints.setdefault(
            event.tick, CheckpointState(event.round, event.slot)
        )
        checkpoint.written[event.site, event.stage, event.shard] = dict(event.digests)

    def _kept(self, event: e.CheckpointCommitted) -> None:
        where = self.checkpoints[event.tick]
        where.sites = list(event.sites)
        self._forget_checkpoints()
        self._say(event, "checkpoint", f"checkpoint at round {where.round} slot {where.slot}")

    def _forget_checkpoints(self) -> None:
        whole = sorted(tick for tick, item in self.checkpoints.items() if item.sites is not None)
        most = max(CHECKPOINTS, self.config.checkpoint.keep)
        for tick in whole[:-most]:
            if tick != self.first_tick:
                del self.checkpoints[tick]

    def _spoiled(self, event: e.CheckpointCorrupt) -> None:
        del self.checkpoints[event.tick]
        self.sites[event.site].spoiled = True
        self._say(event, "phase", f"checkpoint at slot {event.tick} is spoiled: {event.reason}")

    def _reported(self, event: e.Reported) -> None:
        self.sites[event.site].metrics[event.kind] = {**event.metrics, "round": event.round}
        early_end.note(self, event)
        self.sequence += 1

    def _finished(self, event: e.Finished) -> None:
        site = self.sites[event.site]
        site.finished.add((event.stage, event.shard))
        site.complete = site.complete and event.complete
        if len(site.finished) == self.config.site.exchanging_ranks:
            site.role = "finished"
            self._say(event, "leave", f"{event.site} has finished")

    def _ended(self, event: e.Ended) -> None:
        self.phase, self.reason = event.phase, event.reason
        self._say(event, "phase", event.line)

    def _stored(self, event: e.Stored) -> None:
        if event.value is None:
            self.store.pop(event.key, None)
            self.owners.pop(event.key, None)
        else:
            self.store[event.key] = event.value
            self.owners[event.key] = event.site

    def _resumed(self, event: e.Resumed) -> None:
        self.plans = {plan.round: plan for plan in map(RoundPlan.model_validate, event.plans)}
        self.ledger = Ledger.from_json(event.ledger, self.ledger.until)
        self.first_round, self.first_tick = event.round, event.tick
        self.resumes += 1
        self.next_round = event.round + 1 if event.round in self.plans else event.round
        self.measured = {}
        for round_, name, measured in event.measured:
            self.measured.setdefault(round_, {})[name] = Measured.model_validate(measured)
        self.exchanges, self.undecided, self.store, self.owners = {}, {}, {}, {}
        self.shown, self.newest = {}, {}
        self.usual = dict(event.usual)
        self.held_out, self.ends_early = early_end.from_log(event.held_out), event.ends_early
        self.checkpoints = {
            tick: item for tick, item in self.checkpoints.items() if tick <= event.tick
        }
        for site in self.sites.values():
            if site.role != "absent":
                site.role, site.reason = "gone", "the run was resumed"
            # Sites report rounds again when they train them again.
            site.metrics = {}
            site.finished, site.left, site.leave_round = set(), set(), None
        self.members, self.starters, self.founder, self.versions = [], [], None, None
        self.phase, self.reason, self.stop_tick = "enrolling", "", None
        self.lease = event.tick
        self._say(event, "phase", f"resumed at round {event.round} slot {event.slot}")


def _opinions(event: e.Voted) -> dict[str, RankOpinion]:
    return {site: RankOpinion.model_validate(said) for site, said in event.opinions.items()}


_APPLY: dict[type[e.Event], Callable[[CoordinatorState, Any], None]] = {
    e.Created: CoordinatorState._created,
    e.Enrolled: CoordinatorState._enrolled,
    e.Started: CoordinatorState._started,
    e.Entered: CoordinatorState._entered,
    e.CheckpointMissing: CoordinatorState._lacking,
    e.StartupRestarted: CoordinatorState._regathered,
    e.Ready: CoordinatorState._ready,
    e.Shown: CoordinatorState._shown,
    e.Doubted: CoordinatorState._doubted,
    e.Renewed: CoordinatorState._renewed,
    e.Activated: CoordinatorState._activated,
    e.Overtaken: CoordinatorState._overtaken,
    e.SiteLost: CoordinatorState._gone,
    e.Leaving: CoordinatorState._leaving,
    **dict.fromkeys((e.Banned, e.Unbanned, e.KeyForgotten), CoordinatorState._stood),
    e.RankLeft: CoordinatorState._left,
    e.Planned: CoordinatorState._planned,
    e.Sized: CoordinatorState._sized,
    e.HandedOver: CoordinatorState._handed_over,
    e.RoundDone: CoordinatorState._round_done,
    e.Clocked: CoordinatorState._clocked,
    e.Pinned: CoordinatorState._pinned,
    e.Voted: CoordinatorState._voted,
    e.Fetching: CoordinatorState._fetching,
    e.Broke: CoordinatorState._broke,
    e.Retried: CoordinatorState._retried,
    e.Decided: CoordinatorState._decided,
    e.Leased: CoordinatorState._leased,
    e.EndingEarly: CoordinatorState._ending_early,
    e.Stopping: CoordinatorState._stopping,
    e.CheckpointWritten: CoordinatorState._wrote,
    e.CheckpointCommitted: CoordinatorState._kept,
    e.CheckpointCorrupt: CoordinatorState._spoiled,
    e.Reported: CoordinatorState._reported,
    e.Finished: CoordinatorState._finished,
    e.Ended: CoordinatorState._ended,
    e.Stored: CoordinatorState._stored,
    e.Resumed: CoordinatorState._resumed,
}
