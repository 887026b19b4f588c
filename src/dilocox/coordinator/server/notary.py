"""The coordinator's interface to the run's record, the log with which strangers verify a run.

`RecordSink` is the interface of the record's writer. `RecordHook` calls the writer, if any.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dilocox.config.codec_spec import names_payload
from dilocox.coordinator.protocol.custody_messages import CustodyReply, CustodyRequest
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
    """A final contribution set."""

    key: ExchangeKey
    attempt: int
    set: Sequence[str]
    """Sites whose contributions count, in run file order."""
    owners: Sequence[str]
    """Sites that contributed to the attempt, in run file order: owners of chunks in `reduce`."""
    plan: RoundPlan
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    shares: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Shares that count, by site and shard, in 65,536ths; empty: all payloads count in full."""


class LogHead(Protocol):
    """A moment of the log."""

    @property
    def size(self) -> int:
        """Number of statements."""

    @property
    def root(self) -> bytes:
        """Root of the Merkle tree, 32 bytes."""


class RecordSink(Protocol):
    """Writer of the run's record: signs and stores what the coordinator tells it.

    A method raises only the errors that its docstring names, and `TrainingError` if the disk is
    full or fails. After a `TrainingError` nothing was stored, and the coordinator calls again.
    """

    @property
    def run(self) -> str:
        """Id of the run, which every statement names."""

    @property
    def resumes(self) -> int:
        """Number of resumes that are stored."""

    @property
    def manifest(self) -> str:
        """First entry of the log, to which joining sites have to agree."""

    def enrolled(self, request: EnrolRequest, incarnation: int) -> None:
        """Store that a site joins with its key. Raises `Refused` if it has no usable key."""

    def stake_of(self, site: str) -> str:
        """Return the signature on a stake with which a site has enrolled last; empty: none."""

    def standing(self, site: str, change: StandingChange) -> None:
        """Store the operator's change of a name: a ban, its end, or permission for another key."""

    def committed(self, rank: RankId, key: ExchangeKey, statement: str, *, bound: bool) -> bool:
        """Store a rank's commitment to a contribution, which it makes before payloads are sent.

        Args:
            rank: The rank that commits.
            key: The exchange.
            statement: The commitment, signed with the site's key.
            bound: The payload follows from the contribution alone, so the commitment must name it.

        Returns:
            True if the rank had not committed before.

        Raises:
            Refused: The signature or the statement is wrong, or differs from an earlier commitment.
        """

    def commitments(self, key: ExchangeKey) -> Collection[tuple[str, int]]:
        """Return (site, shard) of all ranks that have committed to an open exchange."""

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
        """Store a rank's signed statement of the payload with which it votes.

        Args:
            rank: The rank that votes.
            key: The exchange.
            attempt: The attempt of the exchange.
            digest: SHA-256 of the payload.
            statement: The statement, signed with the site's key.
            in_time: False if the vote came before all commitments, which no honest rank does.

        Returns:
            True if the rank had committed to this payload. If the vote is not in time, or the rank
            has not committed, the result is False and nothing is stored.

        Raises:
            Refused: The statement says something else, or the signature is wrong.
        """

    def recommitted(self, rank: RankId, key: ExchangeKey, plan: RoundPlan) -> bool:
        """Return whether a rank's commitment differs from the one that it made before a resume.

        `key` is an exchange of `plan` that the run repeats unchanged after the resume.
        """

    def contributions(self, key: ExchangeKey, attempt: int) -> Mapping[tuple[str, int], str]:
        """Return the SHA-256 of the stored payloads of an attempt, by (site, shard)."""

    def checkpoint(self, rank: RankId, statement: str) -> None:
        """Store a rank's signed statement of its model state. Raises `Refused` if it is wrong."""

    def custody(self, rank: RankId, statement: str | None, asked: Sequence[str]) -> dict[str, str]:
        """Store a rank's signed custody of its pieces; None: store nothing.

        Returns the certified roots of the exchanges in `asked` that have one, once these survive a
        power cut. Raises `Refused` if the statement is wrong.
        """

    def verdict(self, by: str, statement: str) -> str | None:
        """Store an auditor's verdict, submitted by the site `by` (empty: the operator).

        Returns one line for people if they have to know of the verdict, else None. Raises
        `Refused` if the statement is not such a verdict, or its auditor has not signed it.
        """

    def head(self) -> LogHead:
        """Return the newest signed checkpoint of the log."""

    def attest(self, site: str, statement: str) -> None:
        """Store a site's signed statement of evidence of a machine.

        Raises `Refused` if the statement is wrong, or is of another site, start or time.
        """

    def planned(self, plan: RoundPlan) -> None:
        """Note a round's plan. Raises nothing: errors are raised by `settle`."""

    def decided(self, decision: Decision) -> None:
        """Note a final contribution set. Raises nothing: errors are raised by `settle`."""

    def resumed(self, round_: int, tick: int) -> None:
        """Note that the run resumes at `tick`, in `round_`. Errors are raised by `settle`."""

    def sync(self) -> None:
        """Return when everything stored so far survives a power cut. Raises `TrainingError`."""

    def settle(self) -> None:
        """Return when all decisions are stored as far as they must be before sites hear of them.

        Raises `TrainingError` if they cannot be stored.
        """

    def tend(self) -> None:
        """Retry writes that have failed. Raises nothing."""

    def cover(self) -> None:
        """Sign the log up to here, in the background: called when a round begins or a run ends."""


class RecordHook:
    """Passes events and requests to the record's writer; without a writer it does nothing."""

    def __init__(self, notary: RecordSink | None) -> None:
        self._notary = notary
        self.run = "" if notary is None else notary.run
        """Id of the run in its record; empty if the run is not recorded."""
        self.manifest = "" if notary is None else notary.manifest
        """First entry of the record's log; empty if the run is not recorded."""
        self._barred: dict[str, set[RankKey]] = {}
        """Ranks that have voted on an exchange without a commitment. Such a rank may not commit any
        more, because other ranks may have sent payloads since."""

    def enrolled(self, request: EnrolRequest, incarnation: int) -> None:
        """Record an enrolment before it takes effect. Raises `Refused`."""
        if self._notary is not None:
            self._notary.enrolled(request, incarnation)

    def stake_of(self, site: str) -> str:
        """Return the signature on a stake with which a site has enrolled last; empty: none."""
        return "" if self._notary is None else self._notary.stake_of(site)

    def standing(self, site: str, change: StandingChange) -> None:
        """Record the operator's change of a name before it takes effect."""
        if self._notary is not None:
            self._notary.standing(site, change)

    def committing(
        self, state: CoordinatorState, exchange: Exchange, request: BeginRequest
    ) -> bool:
        """Record a rank's commitment, before it may send anything.

        Returns True if the commitment is new, so that waiting ranks should be told. Raises
        `Refused` if it is wrong.
        """
        if self._notary is None or request.commitment is None or exchange.decision is not None:
            return False
        rank, plan = request.rank, state.plans[exchange.round]
        if (rank.site, rank.stage, rank.shard) not in state.voters(exchange):
            return False  # The rank comes too late, or only receives.
        if (rank.site, rank.stage, rank.shard) in self._barred.get(request.key, ()):
            return False  # It voted without a commitment, and may have seen payloads since.
        key = ExchangeKey.parse(request.key)
        bound = names_payload(plan.exchange, plan.codec)
        return self._notary.committed(rank, key, request.commitment, bound=bound)

    def is_there(self, request: BeginRequest) -> bool:
        """Return whether the rank counts as present: in a recorded run, only with a commitment."""
        recorded = self._notary is not None and ExchangeKey.parse(request.key).kind == "outer"
        return request.commitment is not None or not recorded

    def awaited(
        self,
        state: CoordinatorState,
        exchange: Exchange,
        request: BeginRequest,
        present: Collection[tuple[str, int]],
    ) -> list[RankKey]:
        """Return the ranks for which the asking rank has to wait before it sends or receives.

        `present` holds (site, shard) of ranks that have begun the exchange. In a recorded run the
        commitments count instead.
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
        """Return the voters that are still missing before payloads may be sent.

        A rank that has voted without a commitment is not waited for: its payload cannot count.
        """
        barred = self._barred.get(exchange.key, ())
        return [
            voter
            for voter in voters
            if (voter[0], voter[2]) not in there
            if voter not in exchange.votes and voter not in barred
        ]

    def voting(self, state: CoordinatorState, exchange: Exchange, request: VoteRequest) -> bool:
        """Record a vote before it counts. Returns whether its rank had committed to its payload.

        Raises `Refused` if a payload that should count is not signed.
        """
        key, rank = ExchangeKey.parse(request.key), request.rank
        # Later phases of a vote cannot change the payload, so only "held" is recorded.
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
        """Return whether a vote's rank committed, before a resume, to another contribution."""
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
        """Return whether all other voters have committed.

        An honest rank votes only then, because it needs their payloads. An earlier vote in the log
        would make the others' commitments look late.
        """
        others = [each for each in state.voters(exchange) if each != voter]
        return not self._lacking(exchange, others, there)

    def state(self, request: StateRequest) -> Done:
        """Record a rank's signed statement of its model state. Raises `Refused`."""
        if self._notary is not None:
            self._notary.checkpoint(request.rank, request.statement)
        return Done()

    def custody(self, request: CustodyRequest) -> CustodyReply:
        """Record a rank's signed custody of its pieces. Raises `Refused`."""
        if self._notary is None:
            return CustodyReply(certified={})
        found = self._notary.custody(request.rank, request.statement, request.asked)
        return CustodyReply(certified=found)

    def verdict(self, by: str, statement: str) -> str | None:
        """Record an auditor's verdict. Returns a line for people, or None. Raises `Refused`."""
        return None if self._notary is None else self._notary.verdict(by, statement)

    def head(self) -> tuple[int, str]:
        """Return size and root (hex) of the newest signed checkpoint; (0, "") without a record."""
        if self._notary is None:
            return 0, ""
        found = self._notary.head()
        return found.size, found.root.hex()

    def attest(self, site: str, statement: str) -> None:
        """Record a site's evidence of a machine. Raises `Refused`."""
        if self._notary is not None:
            self._notary.attest(site, statement)

    def happened(self, state: CoordinatorState, event: e.Event) -> None:
        """Record an event that was logged and applied."""
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
        """Sync the record before a decision is logged. Raises `TrainingError`.

        A logged decision may survive a power cut, so the statements behind it must survive, too.
        One sync per decision serves all votes.
        """
        if self._notary is not None and isinstance(event, e.Decided):
            self._notary.sync()

    def settle(self) -> None:
        """Wait, before sites hear of decisions, until these are stored. Raises `TrainingError`."""
        if self._notary is not None:
            self._notary.settle()

    def tend(self) -> None:
        """Retry what could not be recorded, for example because the disk was full."""
        if self._notary is not None:
            self._notary.tend()

    def reopened(self, state: CoordinatorState) -> None:
        """Bring record and state into agreement after a restart.

        The record may lack the last logged events. If the machine crashed, the last statements may
        be lost, too.
        """
        if self._notary is not None:
            if self._notary.resumes < state.resumes:
                self._notary.resumed(state.first_round, state.first_tick)
            for plan in state.plans.values():
                self._notary.planned(plan)
        for exchange in state.exchanges.values():
            self._decided(state, exchange)
            self._check_votes(exchange)

    def _check_votes(self, exchange: Exchange) -> None:
        """Drop votes of an open exchange whose signed statement is lost: ranks vote again.

        Ranks that have voted without a commitment, in any attempt, are barred again.
        """
        key = ExchangeKey.parse(exchange.key)
        if self._notary is None or key.kind != "outer" or exchange.decision is not None:
            return
        there = self._notary.commitments(key)
        now = {voter for voter, vote in exchange.votes.items() if not vote.committed}
        late = {each for each in exchange.uncommitted | now if (each[0], each[2]) not in there}
        if late:
            self._barred[exchange.key] = late
        if exchange.averaging is not None:
            return
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
