"""One exchange of one fragment between the sites: swap payloads, agree on the set, average.

`gather`: every site receives every payload; no second quantisation. `reduce`: each site owns a
chunk, averages it, quantises the mean again and hands it round: 2(D-1)/D payloads per site.
(ALGORITHM.md §2.) What counts is decided by the coordinator from what every live rank holds;
transfers that a change of members cancelled are repeated in the new group.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from dilocox.compression import Codec, frame_bytes, frame_digest, pack_frame, unpack_frame
from dilocox.errors import ExchangeError
from dilocox.outer.averaging import average, chunk_bounds, requantise
from dilocox.outer.coordinator.messages import BeginReply, ExchangeKey, VoteReply
from dilocox.outer.groups import EpochChangedError, PeerGroup, Transfer

log = logging.getLogger(__name__)


class Ballot(Protocol):
    """The coordinator, as an exchange sees it."""

    def begin(self, key: ExchangeKey) -> BeginReply:
        """The group that carries `key`."""

    def vote(
        self,
        key: ExchangeKey,
        attempt: int,
        *,
        held: Sequence[str],
        contributes: bool,
        phase: Literal["held", "done"],
        digests: Mapping[str, str],
    ) -> VoteReply:
        """Say what is held here and wait for the decision."""

    def observe(
        self, key: ExchangeKey, attempt: int, *, phase: Literal["held", "done"]
    ) -> VoteReply:
        """Wait for the decision without a vote."""

    def report_broken(self, key: ExchangeKey, attempt: int, failed: Sequence[str]) -> VoteReply:
        """The attempt cannot be completed here."""

    def epoch(self) -> int:
        """Id of the newest membership epoch heard of."""

    def group(self, begun: BeginReply, superseded: Callable[[], bool]) -> PeerGroup:
        """The group of an attempt, formed if it is not there yet."""


@dataclass(frozen=True)
class Contribution:
    """What a site brings to an exchange. `values`: u, flat fp32 [length] on the CPU; none for a
    site that only receives."""

    key: ExchangeKey
    length: int
    values: torch.Tensor | None
    codec: Codec
    mode: str
    weights: Mapping[str, float]
    """w_i by site, of all members of the round's plan."""
    contributes: bool = True


@dataclass(frozen=True)
class Outcome:
    """What came of an exchange."""

    average: torch.Tensor | None
    """Averaged pseudo-gradient, flat fp32 [length]; none if nobody contributed."""
    contributors: tuple[str, ...]
    sent: torch.Tensor | None
    """What the others saw of this site; none if it was left out."""
    second_error: tuple[int, torch.Tensor] | None
    """`reduce`: start of this site's chunk and (sum of w)·epsilon, to enter its residual."""
    payload_bytes: int
    """Bytes that this rank handed to the network."""
    seconds: float
    attempts: int
    missed: bool = False
    """The exchange was begun before this site was there."""


class RepeatError(ExchangeError):
    """The attempt is over; begin again."""


def exchange(ballot: Ballot, me: str, contribution: Contribution) -> Outcome:
    """Carry one exchange to its decision, over as many attempts as it takes.

    Raises `ExchangeError` when no decision comes within the limit, naming who was waited for.
    """
    start = time.monotonic()
    sent_bytes = 0
    attempts = 0
    while True:
        attempts += 1
        begun = ballot.begin(contribution.key)
        if me not in [member.site for member in begun.members]:
            return Outcome(None, (), None, None, 0, time.monotonic() - start, attempts, True)
        attempt = _Attempt(ballot, me, contribution, begun)
        try:
            attempt.group = ballot.group(begun, attempt.superseded)
            outcome = attempt.gather() if contribution.mode == "gather" else attempt.reduce()
        except (RepeatError, EpochChangedError):
            sent_bytes += attempt.sent_bytes
            continue
        return Outcome(
            **{
                **vars(outcome),
                "payload_bytes": sent_bytes + attempt.sent_bytes,
                "seconds": time.monotonic() - start,
                "attempts": attempts,
            }
        )


class _Attempt:
    """One attempt of one exchange in one group."""

    group: PeerGroup

    def __init__(
        self,
        ballot: Ballot,
        me: str,
        contribution: Contribution,
        begun: BeginReply,
    ) -> None:
        self._ballot = ballot
        self._me = me
        self._what = contribution
        self._begun = begun
        self._epoch_seen = ballot.epoch()
        self._senders = [m.site for m in begun.members if m.role == "member"]
        self._receivers = [m.site for m in begun.members]
        self._observer = me not in self._senders
        self.sent_bytes = 0

    def superseded(self) -> bool:
        """True if this attempt is over because the members changed."""
        newest = self._ballot.epoch()
        if newest == self._epoch_seen:
            return False
        self._epoch_seen = newest
        return self._ballot.begin(self._what.key).attempt != self._begun.attempt

    def gather(self) -> Outcome:
        """Every payload to every site."""
        codec, length = self._what.codec, self._what.length
        frames: dict[str, torch.Tensor] = {}
        if not self._observer:
            assert self._what.values is not None
            frames[self._me] = pack_frame(codec, length, codec.encode(self._what.values))
        received = self._swap(
            outgoing=dict.fromkeys(self._receivers, frames[self._me]) if not self._observer else {},
            incoming=dict.fromkeys(self._senders, frame_bytes(codec, length)),
            phase=1,
        )
        payloads = self._unpack({**frames, **received}, dict.fromkeys(self._senders, length))
        decision = self._decide("held", payloads, frames.get(self._me))
        if decision.decision != "commit":
            raise ExchangeError(f"{self._what.key.text}: gather was answered {decision.decision}")
        missing = [site for site in decision.set if site not in payloads]
        if missing:
            raise ExchangeError(
                f"{self._what.key.text}: the contribution of {', '.join(missing)} counts but is "
                "not here; this site must join again"
            )
        sent = codec.decode(payloads[self._me], length) if self._me in decision.set else None
        decoded = (
            sent if sent is not None and site == self._me else codec.decode(payloads[site], length)
            for site in decision.set
        )
        return self._outcome(decision, self._average(decoded, decision.set), sent)

    def reduce(self) -> Outcome:
        """Each owner averages its chunk and hands it round."""
        codec, length = self._what.codec, self._what.length
        owners = self._senders
        bounds = dict(zip(owners, chunk_bounds(length, len(owners)), strict=True))
        sizes = {site: end - start for site, (start, end) in bounds.items()}
        mine: dict[str, torch.Tensor] = {}
        pieces: dict[str, torch.Tensor] = {}
        if not self._observer:
            values = self._what.values
            assert values is not None
            for site, (start, end) in bounds.items():
                payload = codec.encode(values[start:end])
                mine[site] = payload
                pieces[site] = pack_frame(codec, end - start, payload)
        own_size = sizes.get(self._me, 0)
        arrived = self._swap(
            outgoing={site: frame for site, frame in pieces.items() if sizes[site]},
            incoming=dict.fromkeys(owners, frame_bytes(codec, own_size)) if own_size else {},
            phase=1,
        )
        if not own_size:
            payloads = dict.fromkeys(owners, torch.empty(0, dtype=torch.uint8))
        else:
            payloads = self._unpack(
                {**arrived, self._me: pieces[self._me]}, dict.fromkeys(owners, own_size)
            )
        decision = self._decide("held", payloads, None)
        if decision.decision == "commit":
            # Decided in an attempt that this rank missed the end of: only the mean is left to get.
            raise ExchangeError(
                f"{self._what.key.text}: was committed without this site; it must join again"
            )
        counted = decision.set
        mean_frame, second = None, None
        if own_size and counted:
            decoded = (codec.decode(payloads[site], own_size) for site in counted)
            mean = self._average(decoded, counted)
            assert mean is not None
            again = requantise(codec, mean, sum(self._what.weights[site] for site in counted))
            mean_frame = pack_frame(codec, own_size, again.payload)
            second = (bounds[self._me][0], again.second_error)
        means = self._swap(
            outgoing=dict.fromkeys(self._receivers, mean_frame) if mean_frame is not None else {},
            incoming={site: frame_bytes(codec, size) for site, size in sizes.items() if size}
            if counted
            else {},
            phase=2,
        )
        if mean_frame is not None:
            means[self._me] = mean_frame
        chunks = self._unpack(means, sizes)
        whole = not counted or all(site in chunks for site, size in sizes.items() if size)
        if not whole:
            raise self._broken([site for site in sizes if sizes[site] and site not in chunks])
        decision = self._decide("done", payloads, None)
        if decision.decision != "commit":
            raise ExchangeError(f"{self._what.key.text}: reduce was answered {decision.decision}")
        result = None
        if counted:
            result = torch.empty(length, dtype=torch.float32)
            for site, (start, end) in bounds.items():
                if end > start:
                    result[start:end] = codec.decode(chunks[site], end - start)
        sent = None
        if self._me in decision.set:
            parts = [codec.decode(mine[s], e - b) for s, (b, e) in bounds.items() if e > b]
            sent = torch.cat(parts)
        return self._outcome(decision, result, sent, second)

    def _average(
        self, decoded: Iterable[torch.Tensor], sites: Sequence[str]
    ) -> torch.Tensor | None:
        if not sites:
            return None
        return average(decoded, [self._what.weights[site] for site in sites])

    def _outcome(
        self,
        decision: VoteReply,
        result: torch.Tensor | None,
        sent: torch.Tensor | None,
        second: tuple[int, torch.Tensor] | None = None,
    ) -> Outcome:
        return Outcome(result, tuple(decision.set), sent, second, self.sent_bytes, 0.0, 1)

    def _swap(
        self, outgoing: Mapping[str, torch.Tensor], incoming: Mapping[str, int], phase: int
    ) -> dict[str, torch.Tensor]:
        """Send and receive at once; what this rank owes itself is left out.

        Raises `RepeatError` after telling the coordinator which links broke.
        """
        tag = zlib.crc32(f"{self._what.key.text}#{self._begun.attempt}#{phase}".encode()) >> 1
        buffers = {
            site: torch.empty(size, dtype=torch.uint8)
            for site, size in incoming.items()
            if site != self._me
        }
        transfers = [self.group.receive(buffer, site, tag) for site, buffer in buffers.items()]
        for site, frame in outgoing.items():
            if site != self._me:
                transfers.append(self.group.send(frame, site, tag))
                self.sent_bytes += frame.numel()
        self._complete(transfers)
        return buffers

    def _complete(self, transfers: list[Transfer]) -> None:
        failed: list[str] = []
        waiting = list(transfers)
        while waiting and not failed:
            if self.superseded():
                for transfer in waiting:
                    transfer.give_up()
                raise RepeatError("members changed")
            waiting[0].wait(0.02)
            left = []
            for transfer in waiting:
                try:
                    if not transfer.poll():
                        left.append(transfer)
                except ExchangeError as error:
                    log.warning("%s: %s", self._what.key.text, error)
                    failed.append(transfer.site)
            waiting = left
        if failed:
            for transfer in waiting:
                transfer.give_up()
            raise self._broken(failed)

    def _unpack(
        self, frames: Mapping[str, torch.Tensor], lengths: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        payloads = {}
        for site, frame in frames.items():
            try:
                payloads[site] = unpack_frame(frame, self._what.codec, lengths[site])
            except ExchangeError as error:
                log.warning("%s from %s: %s", self._what.key.text, site, error)
        return payloads

    def _broken(self, failed: Sequence[str]) -> RepeatError:
        sites = sorted(set(failed))
        self._ballot.report_broken(self._what.key, self._begun.attempt, sites)
        return RepeatError(f"{self._what.key.text}: no link to {', '.join(sites)}")

    def _decide(
        self,
        phase: Literal["held", "done"],
        payloads: Mapping[str, torch.Tensor],
        own: torch.Tensor | None,
    ) -> VoteReply:
        """Vote and wait. Raises `RepeatError`, or `ExchangeError` naming who was waited for."""
        key, attempt = self._what.key, self._begun.attempt
        if self._observer:
            reply = self._ballot.observe(key, attempt, phase=phase)
        else:
            digests = {}
            if own is not None:
                digests[self._me] = frame_digest(own).hex()
            reply = self._ballot.vote(
                key,
                attempt,
                held=[site for site in self._senders if site in payloads],
                contributes=self._what.contributes,
                phase=phase,
                digests=digests,
            )
        if reply.decision == "repeat":
            raise RepeatError("members changed")
        return reply
