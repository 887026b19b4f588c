"""Who writes down, for strangers, what the coordinator hears and decides: its side of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dilocox.config.codec_spec import names_payload
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import (
    BeginRequest,
    Done,
    EnrolRequest,
    RankId,
    RoundPlan,
    StandingChange,
    StateRequest,
    VoteRequest,
)
from dilocox.coordinator.protocol.verdicts import Verdict
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.exchange_votes import Exchange, RankKey
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.state import CoordinatorState


@dataclass(frozen=True)
class Decision:
    """A contribution set that was decided."""

    key: ExchangeKey
    attempt: int
    set: Sequence[str]
    """Sites that count, run file order."""
    owners: Sequence[str]
    """Sites that contributed to the attempt, run file order: the owners of chunks in `reduce`."""
    plan: RoundPlan
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    shares: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """What counts of each site by shard, in 65,536ths; empty: all of it."""


class RecordSink(Protocol):
    """Signs and keeps what it is told. No call may raise but with what it says here, and with
    `TrainingError` where its disk is full or fails: then it has kept nothing, and is told again.
    """

    @property
    def run(self) -> str:
        """The run's id, which every statement names."""

    @property
    def resumes(self) -> int:
        """How many resumes it has kept."""

    @property
    def manifest(self) -> str:
        """The log's first entry: what sites that join have to agree to."""

    def enrolled(self, request: EnrolRequest, incarnation: int) -> None:
        """A site is let in with this key. Raises `Refused` for a site without a usable one."""

    def standing(self, site: str, change: StandingChange) -> None:
        """The operator bans a name, lets it in again, or lets it have another key."""

    def committed(self, rank: RankId, key: ExchangeKey, statement: str, *, bound: bool) -> bool:
        """A rank says what it will contribute, before any payload is sent; whether that is news.

        `bound`: the payload follows from the contribution alone, and has to be named. Raises
        `Refused` unless the site's key has signed it, and for another than it has said before.
        """

    def commitments(self, key: ExchangeKey) -> Collection[tuple[str, int]]:
        """(site, shard) of all that have committed to a contribution to an open exchange."""

    def contribution(
        self,
        rank: RankId,
        key: ExchangeKey,
        attempt: int,
        digest: str,
        statement: str,
        *,
        in_time: bool = True,
    ) -> bool:
        """A rank votes with a payload of this SHA-256, and signs it; whether it is the one that it
        had committed to.

        Unless it is `in_time`, or if the rank has committed to nothing, it is none, and not kept.
        Raises `Refused` unless the statement says just that and the site's key has signed it.
        """

    def recommitted(self, rank: RankId, key: ExchangeKey, plan: RoundPlan) -> bool:
        """Whether a rank has committed to another contribution than before a resume, to an
        exchange of this plan that the run repeats as it was."""

    def contributions(self, key: ExchangeKey, attempt: int) -> Mapping[tuple[str, int], str]:
        """SHA-256 of the payloads of an attempt that are kept, by (site, shard)."""

    def checkpoint(self, rank: RankId, statement: str) -> None:
        """A rank says what model state it holds. Raises `Refused` as `contribution` does."""

    def verdict(self, by: str, statement: str) -> str | None:
        """An auditor's verdict is handed in `by` a site (empty: by the operator); one line on it
        if it is news that people have to know.

        Raises `Refused` unless the statement says just that and its auditor has signed it.
        """

    def planned(self, plan: RoundPlan) -> None:
        """A round's plan is made. Raises nothing: see `settle`."""

    def decided(self, decision: Decision) -> None:
        """A contribution set is final. Raises nothing: see `settle`."""

    def resumed(self, round_: int, tick: int) -> None:
        """The run goes back to `tick`, in `round_`. Raises nothing: see `settle`."""

    def sync(self) -> None:
        """Return when all that was said so far will survive a power cut. Raises `TrainingError`."""

    def settle(self) -> None:
        """Return when sites may hear of all that was decided: it is kept, as far as it has to be.
        Raises `TrainingError`."""

    def tend(self) -> None:
        """Try again what has failed. Raises nothing."""

    def cover(self) -> None:
        """A round begins: what was said so far is complete."""


class RecordHook:
    """Tells a notary, if there is one, what it has to know."""

    def __init__(self, notary: RecordSink | None) -> None:
        self._notary = notary
        self.run = "" if notary is None else notary.run
        """The run's id in its record; empty if nothing is recorded."""
        self.manifest = "" if notary is None else notary.manifest
        """The first entry of the record's log, whole; likewise."""
        self._barred: dict[str, set[RankKey]] = {}
        """Who has voted on an exchange without a commitment: payloads may have been sent since."""

    def enrolled(self, request: EnrolRequest, incarnation: int) -> None:
        """Before the site is let in. Raises `Refused`."""
        if self._notary is not None:
            self._notary.enrolled(request, incarnation)

    def standing(self, site: str, change: StandingChange) -> None:
        """Before the operator's word counts."""
        if self._notary is not None:
            self._notary.standing(site, change)

    def committing(
        self, state: CoordinatorState, exchange: Exchange, request: BeginRequest
    ) -> bool:
        """Before a rank may send anything; whether that is news to others. Raises `Refused`."""
        if self._notary is None or request.commitment is None or exchange.decision is not None:
            return False
        rank, plan = request.rank, state.plans[exchange.round]
        if (rank.site, rank.stage, rank.shard) not in state.voters(exchange):
            return False  # it comes too late, or only receives
        if (rank.site, rank.stage, rank.shard) in self._barred.get(request.key, ()):
            return False  # in no attempt any more: it may have seen the others' payloads
        key = ExchangeKey.parse(request.key)
        bound = names_payload(plan.exchange, plan.codec)
        return self._notary.committed(rank, key, request.commitment, bound=bound)

    def is_there(self, request: BeginRequest) -> bool:
        """The rank keeps nobody waiting any more. Who does not commit is as good as absent."""
        recorded = self._notary is not None and ExchangeKey.parse(request.key).kind == "outer"
        return request.commitment is not None or not recorded

    def awaited(
        self,
        state: CoordinatorState,
        exchange: Exchange,
        request: BeginRequest,
        present: Collection[tuple[str, int]],
    ) -> list[RankKey]:
        """Whom the rank has to wait for before it sends or expects anything.

        `present`: (site, shard) of those that are there; where they commit, that is what counts.
        """
        if exchange.decision is not None or request.rank.site not in dict(exchange.members):
            return []
        voters, key = state.voters(exchange), ExchangeKey.parse(request.key)
        commits = self._notary is not None and key.kind == "outer"
        there = self._notary.commitments(key) if self._notary is not None and commits else present
        return self._lacking(exchange, voters, there)

    def _lacking(
        self, exchange: Exchange, voters: Sequence[RankKey], there: Collection[tuple[str, int]]
    ) -> list[RankKey]:
        """Voters that are waited for before payloads are sent. Who has voted without a commitment
        has nothing that could count."""
        barred = self._barred.get(exchange.key, ())
        return [
            voter
            for voter in voters
            if (voter[0], voter[2]) not in there
            if voter not in exchange.votes and voter not in barred
        ]

    def voting(self, state: CoordinatorState, exchange: Exchange, request: VoteRequest) -> bool:
        """Before the vote is counted; whether its payload is the one that was committed to.

        Raises `Refused` for a payload that is to count and is not signed.
        """
        key, rank = ExchangeKey.parse(request.key), request.rank
        # Once its set is fixed an exchange's payloads are, too.
        if self._notary is None or key.kind != "outer" or request.phase != "held":
            return True
        voter, digest = (rank.site, rank.stage, rank.shard), request.digests.get(rank.site)
        there = self._notary.commitments(key)
        committed = (rank.site, rank.shard) in there
        if digest is not None or request.contributes:
            if digest is None or request.statement is None:
                raise Refused("refused", f"{rank}: its payload of {request.key} is not signed")
            committed = self._notary.contribution(
                rank, key, request.attempt, digest, request.statement,
                in_time=self._in_time(state, exchange, voter, there),
            )  # fmt: skip
        if (rank.site, rank.shard) not in there:
            self._barred.setdefault(request.key, set()).add(voter)
        return committed

    def recommitted(
        self, state: CoordinatorState, exchange: Exchange, request: VoteRequest
    ) -> bool:
        """Whether a vote is for a contribution that its rank has committed to after a resume, and
        not before it."""
        key = ExchangeKey.parse(request.key)
        if self._notary is None or key.kind != "outer" or request.phase != "held":
            return False
        return self._notary.recommitted(request.rank, key, state.plans[exchange.round])

    def _in_time(
        self,
        state: CoordinatorState,
        exchange: Exchange,
        voter: RankKey,
        there: Collection[tuple[str, int]],
    ) -> bool:
        """No honest rank votes before all have committed: it has to have their payloads. What such
        a vote says in the log would make the others' commitments look late."""
        others = [each for each in state.voters(exchange) if each != voter]
        return not self._lacking(exchange, others, there)

    def state(self, request: StateRequest) -> Done:
        """A rank has signed what model state it holds. Raises `Refused`."""
        if self._notary is not None:
            self._notary.checkpoint(request.rank, request.statement)
        return Done()

    def verdict(self, by: str, statement: str) -> str | None:
        """Keep an auditor's verdict; what the run's messages say of it, if they do. Raises
        `Refused`."""
        return None if self._notary is None else self._notary.verdict(by, statement)

    def happened(self, state: CoordinatorState, event: e.Event) -> None:
        """An event was logged and applied."""
        if self._notary is None:
            return
        if isinstance(event, e.Decided):
            self._decided(state, state.exchanges[event.key])
        elif isinstance(event, e.Resumed):
            self._barred.clear()
            self._notary.resumed(event.round, event.tick)
        elif isinstance(event, e.Planned):
            self._barred = {k: each for k, each in self._barred.items() if k in state.exchanges}
            self._notary.planned(state.plans[event.plan["round"]])
            self._notary.cover()
        elif isinstance(event, e.Ended):
            self._notary.cover()

    def deciding(self, event: e.Event) -> None:
        """Before an event is logged. The event log may keep a decision through a power cut, wanted
        or not: then what it was made from must be there, too. Once for all votes, not for each.

        Raises `TrainingError`.
        """
        if self._notary is not None and isinstance(event, e.Decided):
            self._notary.sync()

    def settle(self) -> None:
        """Before anybody is told what was decided. Raises `TrainingError`."""
        if self._notary is not None:
            self._notary.settle()

    def tend(self) -> None:
        """Try again what a disk has kept from being recorded."""
        if self._notary is not None:
            self._notary.tend()

    def reopened(self, state: CoordinatorState) -> None:
        """After a restart: what was logged last may not have been told, and of what was said the
        end may be lost, if it was the machine that died."""
        if self._notary is not None:
            if self._notary.resumes < state.resumes:
                self._notary.resumed(state.first_round, state.first_tick)
            for plan in state.plans.values():
                self._notary.planned(plan)
        for exchange in state.exchanges.values():
            self._decided(state, exchange)
            self._check_votes(exchange)

    def _check_votes(self, exchange: Exchange) -> None:
        """Of an exchange that is open: votes whose signed payload is lost are waited for again."""
        key = ExchangeKey.parse(exchange.key)
        undecided = exchange.decision is None and exchange.averaging is None
        if self._notary is None or key.kind != "outer" or not undecided:
            return
        there = self._notary.commitments(key)
        kept = self._notary.contributions(key, exchange.attempt)
        for voter, vote in list(exchange.votes.items()):
            place = (voter[0], voter[2])
            if vote.committed and vote.digest is not None and kept.get(place) != vote.digest:
                del exchange.votes[voter]
            elif place not in there:
                self._barred.setdefault(exchange.key, set()).add(voter)

    def _decided(self, state: CoordinatorState, exchange: Exchange) -> None:
        if self._notary is None or exchange.decision is None:
            return
        owners = [
            site
            for site, incarnation in exchange.members
            if state.sites[site].incarnation == incarnation
            and state.takes_part(site, exchange.round)
        ]
        key, plan = ExchangeKey.parse(exchange.key), state.plans[exchange.round]
        decision = Decision(
            key, exchange.attempt, exchange.decision, owners, plan, exchange.verdicts,
            exchange.shares,
        )  # fmt: skip
        self._notary.decided(decision)
