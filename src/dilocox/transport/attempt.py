"""One attempt of one exchange: frames swapped in one group, and the vote about them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import torch

from dilocox.compression import (
    FramePart,
    frame_bytes,
    unpack_frame,
)
from dilocox.coordinator.client.errors import CoordinatorError
from dilocox.coordinator.protocol.messages import BeginReply, ExchangeKey, VoteReply
from dilocox.coordinator.protocol.verdicts import RankOpinion, VotePhase
from dilocox.errors import ExchangeError
from dilocox.outer.averaging import average
from dilocox.outer.contribution import Contribution
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.times import LinkTimes
from dilocox.transport.link.transfer import Transfer
from dilocox.transport.unreached import UnreachedError
from dilocox.utils import tracing

log = logging.getLogger(__name__)

LOOK = 0.1
"""Seconds between two looks whether members changed, or a link broke, while payloads travel."""


class ExchangeBackend(Protocol):
    """The coordinator, as an exchange sees it."""

    def commit(self, what: Contribution, payload: bytes | None) -> str | None:
        """The signed statement of what this rank will contribute, whatever the attempt; none where
        nothing is recorded.

        `payload`: SHA-256 of what will be sent, where that does not hang on the group.
        """

    def keep(self, key: ExchangeKey, payloads: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to keep these payloads, where the run is recorded; what waits until they are kept,
        or cannot be."""

    def begin(self, key: ExchangeKey, commitment: str | None = None) -> BeginReply:
        """The group that carries `key`, once all members are there for it; with a `commitment`
        once all have given theirs."""

    def attempt(self, key: ExchangeKey) -> int:
        """The attempt that `key` is at; waits for nobody."""

    def vote(
        self,
        key: ExchangeKey,
        attempt: int,
        *,
        held: Sequence[str],
        contributes: bool,
        phase: VotePhase,
        digests: Mapping[str, str],
        opinions: Mapping[str, RankOpinion],
    ) -> VoteReply:
        """Say what is held here, and what is thought of it, and wait for the decision."""

    def observe(self, key: ExchangeKey, attempt: int, *, phase: VotePhase) -> VoteReply:
        """Wait for the decision without a vote."""

    def report_broken(self, key: ExchangeKey, attempt: int, failed: Sequence[str]) -> VoteReply:
        """The attempt cannot be completed here."""

    def epoch(self) -> int:
        """Id of the newest membership epoch heard of."""

    def group(self, begun: BeginReply, superseded: Callable[[], bool]) -> PeerGroup:
        """The group of an attempt, formed if it is not there yet."""


class Turn(Protocol):
    """An exchange's turn to use the link, among those of the same rank."""

    waited: float
    """Seconds spent in `take`."""

    def take(self) -> None:
        """Wait until those before it have passed it on; at once if this one has, too."""

    def pass_on(self) -> None:
        """Its first payloads are through: the next one's may travel. May be said again."""


class RepeatError(ExchangeError):
    """The attempt is over; begin again."""


class Attempt:
    """One attempt of one exchange in one group."""

    def __init__(
        self,
        ballot: ExchangeBackend,
        me: str,
        contribution: Contribution,
        begun: BeginReply,
        turn: Turn,
        times: LinkTimes | None = None,
    ) -> None:
        """`times`: of this rank's transfers, where each of them has a limit."""
        self._ballot = ballot
        self.me = me
        self.contribution = contribution
        self._begun = begun
        self._turn, self._times = turn, times
        self._group: PeerGroup | None = None
        # Not what the ballot knows by now: an epoch that began since may have superseded this.
        self._epoch_seen = begun.epoch
        self.senders = [m.site for m in begun.members if m.role == "member"]
        self.receivers = [m.site for m in begun.members]
        self.observes = me not in self.senders
        """This site receives only."""
        self.sent_bytes = 0
        self.opinions: dict[str, RankOpinion] = {}
        """What is to be said of contributions with the vote."""
        self.link: list[tuple[float, float, int]] = []
        self.late: Mapping[str, float] = {}
        """Seconds after the first site at which each was there; once it is decided."""

    def superseded(self) -> bool:
        """True if this attempt is over because the members changed."""
        newest = self._ballot.epoch()
        if newest == self._epoch_seen:
            return False
        self._epoch_seen = newest
        return self._ballot.attempt(self.contribution.key) != self._begun.attempt

    def swap(
        self,
        outgoing: Mapping[str, torch.Tensor],
        incoming: Mapping[str, FramePart],
        phase: int,
        patience: float = 1.0,
    ) -> dict[str, torch.Tensor]:
        """Send frames and receive those of `incoming` at once; the frames that came.

        What this rank owes itself is left out. The first one waits for the exchange's turn; then
        the next exchange may use the link, which further messages share with it. `patience`: share
        of the time-out after which it is too slow, below one if others wait for this rank. Raises
        `RepeatError` after telling the coordinator which links broke, and `EpochChangedError`.
        """
        if self._group is None:
            self._turn.take()
            self._group = self._formed()
        group = self._group
        tag = _tag(f"{self.contribution.key.text}#{self._begun.attempt}#{phase}")
        buffers = {
            site: self.contribution.staging.empty(frame_bytes(part))
            for site, part in incoming.items()
            if site != self.me
        }
        receiving = [group.receive(buffer, site, tag) for site, buffer in buffers.items()]
        transfers = list(receiving)
        for site, frame in outgoing.items():
            if site != self.me:
                transfers.append(group.send(frame, site, tag))
                self.sent_bytes += frame.numel()
        with tracing.span("swap", phase=phase, transfers=len(transfers)):
            self._complete(transfers, patience)
        self._turn.pass_on()
        if receiving:
            # Payloads travel when they are asked for: none of them waits in a buffer of this
            # machine, however late this rank comes.
            began = min(each.began for each in receiving)
            ended = max(each.ended for each in receiving)
            self.link.append((began, ended, sum(each.size for each in receiving)))
        return buffers

    def _formed(self) -> PeerGroup:
        try:
            return self._ballot.group(self._begun, self.superseded)
        except UnreachedError as error:
            log.warning("%s: %s", self.contribution.key.text, error)
            raise self.broken(error.sites) from None

    def _complete(self, transfers: list[Transfer], patience: float) -> None:
        start = time.monotonic()
        failed: list[str] = []
        waiting = list(transfers)
        while waiting and not failed:
            passed = time.monotonic() - start
            if self.superseded():
                for transfer in waiting:
                    transfer.give_up()
                self._tell_of_slow(waiting, 2 * passed, patience)
                raise RepeatError("members changed")
            waiting[0].wait(LOOK)
            left = []
            for transfer in waiting:
                try:
                    if transfer.poll():
                        self._ended(transfer)
                    elif self._too_slow(transfer, passed, patience):
                        failed.append(transfer.site)
                    else:
                        left.append(transfer)
                except ExchangeError as error:
                    log.warning("%s: %s", self.contribution.key.text, error)
                    failed.append(transfer.site)
            waiting = left
        if failed:
            for transfer in waiting:
                transfer.give_up()
            raise self.broken(failed)

    def _ended(self, transfer: Transfer) -> None:
        if self._times is not None:
            self._times.note(transfer)

    def _too_slow(self, transfer: Transfer, seconds: float, patience: float) -> bool:
        if self._times is None:
            return False
        problem = self._times.overdue(transfer, seconds, patience)
        if problem is not None:
            log.warning("%s: %s", self.contribution.key.text, problem)
            transfer.give_up()
        return problem is not None

    def _tell_of_slow(self, waiting: Sequence[Transfer], seconds: float, patience: float) -> None:
        """Another rank was the first to break the attempt. What hangs here, too, is told, so that
        it is not the word of one alone; not of peers that have not begun, which may have waited."""
        slow = {
            transfer.site
            for transfer in waiting
            if transfer.moves and self._too_slow(transfer, seconds, patience)
        }
        if slow:
            # It may have been decided without this site meanwhile.
            with contextlib.suppress(CoordinatorError):
                self._ballot.report_broken(self.contribution.key, self._begun.attempt, sorted(slow))

    def unpack(
        self,
        frames: Mapping[str, torch.Tensor],
        parts: Mapping[str, FramePart],
        *,
        contributions: bool = False,
        check: Callable[[torch.Tensor], object] = lambda payload: None,
    ) -> dict[str, torch.Tensor]:
        """Payloads, in host memory, of the frames that are what they should be; the others are left
        out.

        `contributions`: what is wrong with them is said with the vote. `check` raises
        `ExchangeError` for a payload that does not decode.
        """
        payloads = {}
        with tracing.span("check frames"):
            for site, frame in frames.items():
                code: Literal["malformed", "not-finite"] = "malformed"
                try:
                    payload = unpack_frame(frame, parts[site])
                    code = "not-finite"
                    check(payload)
                except ExchangeError as error:
                    log.warning("%s from %s: %s", self.contribution.key.text, site, error)
                    if contributions:
                        self.opinions[site] = RankOpinion(code=code)
                else:
                    payloads[site] = payload
        return payloads

    def keep(self, payloads: Sequence[torch.Tensor]) -> Callable[[], None]:
        """See `ExchangeBackend.keep`."""
        return self._ballot.keep(self.contribution.key, payloads)

    def broken(self, failed: Sequence[str]) -> RepeatError:
        """Tell the coordinator whose links broke; the error to raise."""
        sites = sorted(set(failed))
        self._ballot.report_broken(self.contribution.key, self._begun.attempt, sites)
        return RepeatError(f"{self.contribution.key.text}: no link to {', '.join(sites)}")

    def decide(
        self,
        phase: VotePhase,
        held: Iterable[str],
        own_digest: bytes | None = None,
    ) -> VoteReply:
        """Vote and wait. `own_digest`: of the payload that this site has sent to all, for the
        coordinator's log. Raises `RepeatError`."""
        key, attempt = self.contribution.key, self._begun.attempt
        with tracing.span("vote", phase=phase):
            if self.observes:
                reply = self._ballot.observe(key, attempt, phase=phase)
            else:
                whole = set(held)
                reply = self._ballot.vote(
                    key,
                    attempt,
                    held=[site for site in self.senders if site in whole],
                    contributes=self.contribution.contributes,
                    phase=phase,
                    digests={} if own_digest is None else {self.me: own_digest.hex()},
                    opinions=self.opinions,
                )
        if reply.decision == "repeat":
            raise RepeatError("members changed")
        self.late = reply.late
        return reply

    def committed_sites(self, decision: VoteReply, held: Iterable[str]) -> list[str]:
        """The sites whose payloads, by `decision`, make the average by themselves.

        Raises `ExchangeError` unless all of them are among those `held` here.
        """
        here = set(held)
        if decision.decision != "commit":
            raise ExchangeError(
                f"{self.contribution.key.text}: gather was answered {decision.decision}"
            )
        missing = [site for site in decision.set if site not in here]
        if missing:
            raise ExchangeError(
                f"{self.contribution.key.text}: the contribution of {', '.join(missing)} counts "
                "but is not here; this site must join again"
            )
        return decision.set

    def average(self, decoded: Iterable[torch.Tensor], sites: Sequence[str]) -> torch.Tensor | None:
        """Weighted mean of what `sites` sent, in that order; none if there are none."""
        if not sites:
            return None
        return average(decoded, [self.contribution.weights[site] for site in sites])


def _tag(name: str) -> int:
    """Number of a message, which no other message of a group has."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
