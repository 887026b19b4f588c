"""One attempt of one exchange: swap frames in one peer group, then vote on the payloads."""

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
from dilocox.coordinator.protocol.verdicts import RankOpinion, RankVote, VotePhase
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
"""Seconds between two checks for changed members or broken links while payloads travel."""


class ExchangeBackend(Protocol):
    """The coordinator, as an exchange sees it."""

    def commit(self, what: Contribution, payload: bytes | None) -> str | None:
        """Sign a commitment to this rank's contribution, valid for all attempts.

        Returns the signed statement; None if the run is not recorded.

        `payload`: SHA-256 of the payload; None if the payload depends on the group.
        """

    def keep(self, key: ExchangeKey, payloads: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to store these payloads in the record, if the run is recorded.

        Returns a function that blocks until the payloads are stored or storing has failed.
        """

    def begin(self, key: ExchangeKey, commitment: str | None = None) -> BeginReply:
        """Wait until all members have begun exchange `key`, and return its group and attempt.

        With a `commitment`, wait until all members have sent their commitments.
        """

    def attempt(self, key: ExchangeKey) -> int:
        """Return the current attempt number of `key`, without waiting."""

    def vote(self, key: ExchangeKey, attempt: int, vote: RankVote) -> VoteReply:
        """Vote on an attempt and wait for the coordinator's decision."""

    def observe(self, key: ExchangeKey, attempt: int, *, phase: VotePhase) -> VoteReply:
        """Wait for the decision without voting."""

    def report_broken(self, key: ExchangeKey, attempt: int, failed: Sequence[str]) -> VoteReply:
        """Report that this rank cannot complete the attempt, because links to `failed` broke."""

    def epoch(self) -> int:
        """Return the id of the newest membership epoch that this rank knows of."""

    def group(self, begun: BeginReply, superseded: Callable[[], bool]) -> PeerGroup:
        """Return the peer group of an attempt; form the group if it does not exist yet.

        `superseded`: returns True once the attempt is over because the members changed.
        """


class Turn(Protocol):
    """The turn of one exchange to use the link, among the exchanges of the same rank."""

    waited: float
    """Seconds spent in `take`, summed over calls."""

    def take(self) -> None:
        """Block until all earlier exchanges have called `pass_on`.

        Returns at once if this exchange has called `pass_on` itself (in an earlier attempt).
        """

    def pass_on(self) -> None:
        """Let the next exchange use the link: this one's first payloads have arrived.

        A repeated call has no effect.
        """


class RepeatError(ExchangeError):
    """The attempt is over without a decision; the exchange begins another attempt."""


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
        """Prepare an attempt; nothing is sent before `swap`.

        Args:
            ballot: The coordinator, as the exchange uses it.
            me: Name of this site.
            contribution: This site's contribution.
            begun: The members and number of the attempt.
            turn: The exchange's turn to use the link.
            times: Durations of this rank's earlier transfers, from which each transfer gets a
                limit. None: no such limit.
        """
        self._ballot = ballot
        self.me = me
        self.contribution = contribution
        self._begun = begun
        self._turn, self._times = turn, times
        self._group: PeerGroup | None = None
        # The epoch of the reply, and not the newest known one: an epoch that has begun since may
        # have superseded this attempt.
        self._epoch_seen = begun.epoch
        self.senders = [m.site for m in begun.members if m.role == "member"]
        self.receivers = [m.site for m in begun.members]
        self.observes = me not in self.senders
        """True if this site only receives."""
        self.sent_bytes = 0
        self.opinions: dict[str, RankOpinion] = {}
        """Opinions of contributions by site, to be sent with the next vote."""
        self.link: list[tuple[float, float, int]] = []
        """(start, end, bytes) of each swap's received frames; times are `time.time`, seconds."""
        self.late: Mapping[str, float] = {}
        """Seconds by which each site arrived after the first site; empty before the decision."""

    def superseded(self) -> bool:
        """Return True if this attempt is over because the members changed."""
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
        """Send the frames of `outgoing` and receive the frames of `incoming`, all at once.

        The first swap waits for the exchange's turn. After it the next exchange may use the link,
        together with further messages of this exchange. Entries for this site itself are skipped.

        Args:
            outgoing: Frame by receiving site, uint8 in host memory.
            incoming: By sending site, what its frame encodes.
            phase: Number of the message within the attempt.
            patience: Share of the time-out after which a transfer is too slow; below 1 if other
                sites wait for this rank's next message.

        Returns:
            Received frames by sender, uint8 [`frame_bytes(part)`] each, in host memory. Their
            contents are not checked.

        Raises:
            RepeatError: A link broke or was too slow, and the coordinator has been told; or the
                members changed.
            EpochChangedError: The members changed while the group was formed.
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
            # Payloads travel only after the receiver has asked for them. So no payload waits in a
            # buffer of this machine, and the times are the link's however late this rank comes.
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
        """Report slow transfers of an attempt that another rank was the first to report broken.

        A second report keeps the coordinator from relying on one rank alone. Peers that have not
        begun to send are not reported: they may have been waiting themselves.
        """
        slow = {
            transfer.site
            for transfer in waiting
            if transfer.moves and self._too_slow(transfer, seconds, patience)
        }
        if slow:
            # The exchange may have been decided without this site in the meantime.
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
        """Return the payloads of valid frames by site, uint8 in host memory.

        An invalid frame is logged and left out.

        Args:
            frames: Received frames by site.
            parts: By site, what its frame must encode.
            contributions: True if the vote must name the sites of invalid frames; adds an opinion
                for each of them to `opinions`.
            check: Raises `ExchangeError` for a payload that does not decode.
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
        """Begin to store payloads in the record; see `ExchangeBackend.keep`."""
        return self._ballot.keep(self.contribution.key, payloads)

    def broken(self, failed: Sequence[str]) -> RepeatError:
        """Report the links to `failed` as broken to the coordinator; return the error to raise."""
        sites = sorted(set(failed))
        self._ballot.report_broken(self.contribution.key, self._begun.attempt, sites)
        return RepeatError(f"{self.contribution.key.text}: no link to {', '.join(sites)}")

    def decide(
        self,
        phase: VotePhase,
        held: Iterable[str],
        own_digest: bytes | None = None,
    ) -> VoteReply:
        """Vote and wait for the coordinator's decision. A site that only receives does not vote.

        Args:
            phase: Which vote of the attempt this is.
            held: Sites whose payloads this rank holds whole.
            own_digest: SHA-256 of the payload that this site has sent to all, for the
                coordinator's log.

        Raises:
            RepeatError: The members changed.
        """
        key, attempt = self.contribution.key, self._begun.attempt
        with tracing.span("vote", phase=phase):
            if self.observes:
                reply = self._ballot.observe(key, attempt, phase=phase)
            else:
                whole = set(held)
                vote = RankVote(
                    phase=phase,
                    held=[site for site in self.senders if site in whole],
                    contributes=self.contribution.contributes,
                    digests={} if own_digest is None else {self.me: own_digest.hex()},
                    opinions=self.opinions,
                )
                reply = self._ballot.vote(key, attempt, vote)
        if reply.decision == "repeat":
            raise RepeatError("members changed")
        self.late = reply.late
        return reply

    def committed_sites(self, decision: VoteReply, held: Iterable[str]) -> list[str]:
        """Return the contribution set of a committed `decision`, in order.

        Raises `ExchangeError` if the decision is not "commit", or if a payload of the set is not
        among those `held` here.
        """
        here = set(held)
        if decision.decision != "commit":
            raise ExchangeError(
                f"internal error: {self.contribution.key.text}: the coordinator decided "
                f"'{decision.decision}' for a gather exchange"
            )
        missing = [site for site in decision.set if site not in here]
        if missing:
            raise ExchangeError(
                f"{self.contribution.key.text}: the contribution of {', '.join(missing)} counts "
                "but this site does not have it; this site must join again"
            )
        return decision.set

    def average(self, decoded: Iterable[torch.Tensor], sites: Sequence[str]) -> torch.Tensor | None:
        """Return the weighted mean of the `decoded` contributions of `sites`, in that order.

        Returns None if `sites` is empty.
        """
        if not sites:
            return None
        return average(decoded, [self.contribution.weights[site] for site in sites])


def _tag(name: str) -> int:
    """Return the message tag for `name`: 64 bits of its SHA-256, unique within a group."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
