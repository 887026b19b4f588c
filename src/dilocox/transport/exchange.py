"""One exchange of one fragment: swap payloads, agree on the contribution set, average.

Modes, for D sites (docs/algorithm.md §2, §3):

- `gather`: every site receives every payload. There is no second quantisation.
- `reduce`: each site owns a chunk, averages the chunk, quantises the mean again and sends the mean
  to all sites. Each site sends 2(D-1)/D payloads.
- A low-rank codec needs two messages before its `gather`: all sites send their factors to one
  owner, and the owner sends the basis on which all sites project.

The coordinator decides which contributions count, from the payloads that every live rank holds.
Transfers that a change of members cancelled are repeated in the new group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from dilocox.compression import (
    LowRank,
    Part,
    all_zero,
    frame_digest,
    frame_payload,
    payload_digest,
    refuse_unusable,
)
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.errors import ExchangeError
from dilocox.outer.averaging import chunk_bounds, requantise
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.contribution_set import Weighing
from dilocox.transport.attempt import Attempt, ExchangeBackend, RepeatError, Turn
from dilocox.transport.groups import EpochChangedError
from dilocox.transport.link.times import LinkTimes
from dilocox.transport.payload_fetch import fetch
from dilocox.utils import tracing

log = logging.getLogger(__name__)

OWNER_PATIENCE = 0.75
"""Share of the time-out that a low-rank codec's owner waits for factors. All other sites wait for
the owner's basis. After a whole time-out they would report the owner as the slow site."""

__all__ = ["ExchangeBackend", "exchange"]


def exchange(
    ballot: ExchangeBackend,
    me: str,
    contribution: Contribution,
    turn: Turn,
    times: LinkTimes | None = None,
) -> Outcome:
    """Run one exchange until the coordinator has decided it, in as many attempts as needed.

    Before its `turn` the exchange encodes, commits to its payload and asks for the members. After
    its turn it votes and averages. There is no time limit of its own: the exchange waits while the
    coordinator answers, because the coordinator removes sites that are gone or too slow.

    Args:
        ballot: The coordinator, as the exchange uses it.
        me: Name of this site.
        contribution: This site's contribution, the same in every attempt.
        turn: The order in which this rank's exchanges use the link.
        times: Durations of this rank's earlier transfers, which limit new transfers. None: no such
            limit.

    Returns:
        The outcome. `missed` is True if the exchange began before this site was a member.

    Raises:
        ExchangeError: The coordinator's decision cannot be followed at this site.
    """
    what = contribution
    with tracing.span(
        "exchange",
        key=what.key.text,
        codec=what.compressor.name,
        mode=what.mode,
        values=what.length,
    ) as at:
        outcome = _carry(ballot, me, contribution, turn, times)
        at.note(payload_bytes=outcome.payload_bytes, attempts=outcome.attempts)
    return outcome


def _carry(
    ballot: ExchangeBackend,
    me: str,
    contribution: Contribution,
    turn: Turn,
    times: LinkTimes | None,
) -> Outcome:
    start, work = time.monotonic(), time.thread_time()
    sent_bytes = 0
    attempts = 0
    frame, run = _strategy(contribution)
    commitment = ballot.commit(contribution, None if frame is None else frame_digest(frame))
    while True:
        attempts += 1
        with tracing.span("ask for members"):
            begun = ballot.begin(contribution.key, commitment)
        roles = {member.site: member.role for member in begun.members}
        # Once an exchange is decided, no site sends its payload again.
        if me not in roles or (begun.decided and roles[me] == "entering"):
            took = time.monotonic() - start
            return Outcome(None, (), None, None, sent_bytes, took, attempts, True)
        attempt = Attempt(ballot, me, contribution, begun, turn, times)
        try:
            outcome = run(attempt)
        except (RepeatError, EpochChangedError):
            sent_bytes += attempt.sent_bytes
            continue
        return replace(
            outcome,
            payload_bytes=sent_bytes + attempt.sent_bytes,
            seconds=time.monotonic() - start - turn.waited,
            attempts=attempts,
            link=tuple(attempt.link),
            work_seconds=time.thread_time() - work,
            arrivals={
                site: start + seconds - attempt.late.get(me, 0.0)
                for site, seconds in attempt.late.items()
            },
        )


def _strategy(what: Contribution) -> tuple[torch.Tensor | None, Callable[[Attempt], Outcome]]:
    """Return the frame that this site sends to all others, and the function that runs an attempt.

    The frame is None if it depends on the members (`reduce`, low-rank codecs), or if this site
    contributes no values.
    """
    agreement = what.compressor.agreement
    if agreement is not None:
        return None, partial(low_rank, codec=agreement)
    if what.mode != "gather":
        return None, reduce
    frame = _frame_for_all(what)
    return frame, partial(gather, own=frame)


def _frame_for_all(what: Contribution) -> torch.Tensor | None:
    """Encode the frame of `gather`. None if this site contributes no values."""
    if what.values is None:
        return None
    part = what.compressor.part(0, what.length, what.seed)
    with tracing.span("encode", values=what.length):
        return what.pack(part, part.encode(what.values))


def advancing(
    codec: LowRank,
    key: ExchangeKey,
    chosen: Sequence[torch.Tensor],
    weights: Sequence[float],
    basis: torch.Tensor,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that updates a low-rank codec's warm start when exchange `key` lands.

    The function maps the warm start, fp32 [codec.warm_length], to the warm start of the next
    exchange.

    Args:
        codec: The low-rank codec.
        key: The exchange.
        chosen: Payloads that count, uint8 each, in contribution-set order.
        weights: Weights of these payloads.
        basis: The basis that all these payloads were projected on.
    """
    # Landings count from 1, rounds from 0.
    return lambda warm: codec.next_warm(chosen, weights, basis, warm, key.round + 1)


def gather(attempt: Attempt, own: torch.Tensor | None) -> Outcome:
    """Send every payload to every site. `own`: this site's frame; None if it only receives."""
    what = attempt.contribution
    part = what.compressor.part(0, what.length, what.seed)
    return _to_everyone(attempt, part, None if attempt.observes else own, phase=1)[0]


def low_rank(attempt: Attempt, codec: LowRank) -> Outcome:
    """Send factors to one owner, its basis to all sites, then every projection to every site.

    The owner changes from exchange to exchange, so that the work is shared. The owner leaves a
    missing, incomplete or invalid factor out of the basis: any basis is correct as long as all
    sites have the same basis. An invalid basis breaks the attempt, and this rank reports the owner.
    """
    what, me, there = attempt.contribution, attempt.me, attempt.contribution.staging.to_device
    owner = attempt.senders[what.seed % len(attempt.senders)]
    factors: dict[str, torch.Tensor] = {}
    if not attempt.observes:
        assert what.values is not None
        assert what.warm is not None
        with tracing.span("encode", values=what.length):
            factors[me] = what.pack(codec.factor_part, codec.project(what.values, what.warm))
    factors |= attempt.swap(
        outgoing={} if attempt.observes else {owner: factors[me]},
        incoming=dict.fromkeys(attempt.senders, codec.factor_part) if me == owner else {},
        phase=1,
        patience=OWNER_PATIENCE if me == owner else 1.0,
    )
    frames: dict[str, torch.Tensor] = {}
    if me == owner:
        parts = dict.fromkeys(attempt.senders, codec.factor_part)
        whole = attempt.unpack(
            factors, parts, check=lambda factor: codec.check_factor(there(factor))
        )
        with tracing.span("orthonormalise"):
            basis = codec.orthonormalise(
                [there(whole[site]) for site in attempt.senders if site in whole]
            )
        frames[owner] = what.pack(codec.basis_part, basis)
    frames |= attempt.swap(
        outgoing=dict.fromkeys(attempt.receivers, frames[me]) if me == owner else {},
        incoming={owner: codec.basis_part},
        phase=2,
    )
    bases = attempt.unpack(frames, {owner: codec.basis_part}, check=codec.check_basis)
    if owner not in bases:
        raise attempt.broken([owner])
    basis = bases[owner]
    part, own = codec.part(0, what.length, basis=basis), None
    if not attempt.observes:
        assert what.values is not None
        with tracing.span("encode", values=what.length):
            own = what.pack(part, part.encode(what.values))
    outcome, chosen = _to_everyone(attempt, part, own, phase=3)
    if not chosen:
        return outcome
    weights = [what.weights[site] for site in outcome.contributors]
    worth = codec.effective_rank([there(payload) for payload in chosen], basis)
    return replace(
        outcome,
        payloads=(*chosen, basis),
        advance=advancing(codec, what.key, chosen, weights, basis),
        effective_rank=None if worth is None else (worth, codec.low_rank_values),
    )


def _to_everyone(
    attempt: Attempt,
    part: Part,
    own: torch.Tensor | None,
    phase: int,
) -> tuple[Outcome, list[torch.Tensor]]:
    """Send payloads of `part` to every site, vote, and average the payloads that count.

    Args:
        attempt: The attempt.
        part: Content and encoding of a payload.
        own: This site's frame; None if it only receives.
        phase: Number of the message within the attempt.

    Returns:
        The outcome, and the payloads that count, in contribution-set order.
    """
    me = attempt.me
    frames = {} if own is None else {me: own}
    received = attempt.swap(
        outgoing={} if own is None else dict.fromkeys(attempt.receivers, frames[me]),
        incoming=dict.fromkeys(attempt.senders, part),
        phase=phase,
    )
    frames |= received
    payloads, weighing = _weighed(attempt, part, frames)
    digest = None if own is None else frame_digest(own)
    decision = attempt.decide("held", weighing.held, digest)
    if decision.decision == "fetch":
        fetched = fetch(attempt, decision.fetches, frames, part)
        if fetched:
            del payloads, weighing  # the decoded values, before all are decoded again
            payloads, weighing = _weighed(attempt, part, frames | fetched)
        decision = attempt.decide("fetched", weighing.held, digest)
    counted = attempt.committed_sites(decision, weighing.held)
    with tracing.span("average", values=attempt.contribution.length, sites=len(counted)):
        average = weighing.settled(counted, decision.shares)
    sent = weighing.own if me in counted else None
    chosen = [payloads[site] for site in counted]
    return replace(_outcome(attempt, average, counted, sent), payloads=tuple(chosen)), chosen


def _weighed(
    attempt: Attempt,
    part: Part,
    frames: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], Weighing]:
    """Check and decode `frames`; return the payloads of intact frames by site, and their weighing.

    Replaces `attempt.opinions` by an opinion on each frame, to be sent with the next vote.
    """
    attempt.opinions = {}
    parts = dict.fromkeys(attempt.senders, part)
    payloads = attempt.unpack(frames, parts, contributions=True)
    there = attempt.contribution.staging.to_device
    weighing = Weighing(
        attempt.contribution, attempt.me, attempt.senders, lambda each: part.decode(there(each))
    )
    with tracing.span(
        "decode and average", values=attempt.contribution.length, sites=len(payloads)
    ):
        opinions = weighing.examined(payloads)
    for site in weighing.held:
        told = opinions.get(site, RankOpinion())
        digest = frame_digest(frames[site]).hex()
        attempt.opinions[site] = told.model_copy(update={"digest": digest})
    attempt.opinions |= {s: each for s, each in opinions.items() if s not in weighing.held}
    return payloads, weighing


def reduce(attempt: Attempt) -> Outcome:
    """Average in chunks: each owner averages its chunk and sends the mean to all sites."""
    what, me = attempt.contribution, attempt.me
    owners = attempt.senders
    bounds = dict(zip(owners, chunk_bounds(what.length, len(owners)), strict=True))
    chunks = {
        site: what.compressor.part(start, end, what.seed)
        for site, (start, end) in bounds.items()
        if end > start
    }
    frames = {} if attempt.observes else _framed_chunks(what, bounds, chunks)
    mine = {site: frame_payload(frame) for site, frame in frames.items()}
    own = chunks.get(me)
    payloads = _swapped_chunks(attempt, own, frames)
    index = None if attempt.observes else chunk_index(frames.values())
    if what.values is not None and all_zero(what.values):
        attempt.opinions[me] = RankOpinion(code="zero")
    decision = attempt.decide("held", payloads, None if index is None else payload_digest(index))
    if decision.decision == "commit":
        # An attempt whose end this rank missed has been decided: nobody sends its mean again.
        raise ExchangeError(
            f"{what.key.text}: the exchange was committed without this site; this site must join "
            "again"
        )
    counted = decision.set
    alone = []
    if index is not None and me in counted:
        # No other site has these payloads. The contribution counts once all sites have voted
        # "done", even if this site dies afterwards: so the record keeps the payloads before that.
        alone = [index, *(payload for site, payload in mine.items() if site == me)]
    kept = attempt.keep(alone)
    mean = second = result = None
    if own is not None and counted:
        mean, second_error = _mean_of_chunk(attempt, own, payloads, counted)
        second = (bounds[me][0], second_error)
    if counted:
        result = _swapped_means(attempt, bounds, chunks, mean)
    del mean
    kept()
    decision = attempt.decide("done", payloads)
    if decision.decision != "commit":
        raise ExchangeError(
            f"internal error: {what.key.text}: the coordinator decided '{decision.decision}' for a "
            "reduce exchange"
        )
    sent = None
    if me in decision.set:
        with tracing.span("decode", values=what.length):
            sent, _ = _decoded(what, bounds, chunks, mine)
    others = (payload for site, payload in payloads.items() if site != me)
    passed = [] if index is None else [index, *mine.values(), *others]
    outcome = _outcome(attempt, result, decision.set, sent, second)
    return replace(outcome, payloads=tuple(passed))


def _framed_chunks(
    what: Contribution, bounds: Mapping[str, tuple[int, int]], chunks: Mapping[str, Part]
) -> dict[str, torch.Tensor]:
    """Return the frame of this site's payload for each chunk, in host memory, by the chunk's owner.

    Chunks are encoded one after the other, so that only one payload exists beside its frame.
    """
    values = what.values
    assert values is not None
    with tracing.span("encode", values=what.length):
        return {
            site: what.pack(part, part.encode(values[slice(*bounds[site])]))
            for site, part in chunks.items()
        }


def _swapped_chunks(
    attempt: Attempt, own: Part | None, frames: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Send each owner its chunk; return the sites' payloads of this site's chunk `own`, by site.

    If this site owns no chunk, the payloads are empty.
    """
    owners, there = attempt.senders, attempt.contribution.staging.to_device
    arrived = attempt.swap(
        outgoing=frames, incoming={} if own is None else dict.fromkeys(owners, own), phase=1
    )
    if own is None:
        return dict.fromkeys(owners, torch.empty(0, dtype=torch.uint8))
    return attempt.unpack(
        {**arrived, attempt.me: frames[attempt.me]},
        dict.fromkeys(owners, own),
        contributions=True,
        check=lambda payload: refuse_unusable(own.decode(there(payload)), own.name),
    )


def _mean_of_chunk(
    attempt: Attempt, own: Part, payloads: Mapping[str, torch.Tensor], counted: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frame of the requantised mean of this site's chunk, and the mean's second error.

    The mean is over the payloads of the `counted` sites.
    """
    what, there = attempt.contribution, attempt.contribution.staging.to_device
    with tracing.span("decode and average", values=own.values, sites=len(counted)):
        mean = attempt.average((own.decode(there(payloads[site])) for site in counted), counted)
    assert mean is not None
    with tracing.span("encode", values=own.values):
        again = requantise(own, mean, sum(what.weights[site] for site in counted))
        return what.pack(own, again.payload), again.second_error


def chunk_index(frames: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the index of a contribution in `reduce`, whose digest stands for the contribution.

    The index is the SHA-256 digests of its chunks' payloads in the order of the owners, uint8
    [32 x chunks].
    """
    digests = b"".join(frame_digest(frame) for frame in frames)
    if not digests:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(digests), dtype=torch.uint8)


def _swapped_means(
    attempt: Attempt,
    bounds: Mapping[str, tuple[int, int]],
    chunks: Mapping[str, Part],
    mean: torch.Tensor | None,
) -> torch.Tensor:
    """Send the frame `mean` of this site's chunk to all sites; return the whole average, fp32.

    `mean` is None if this site owns no chunk. Raises `RepeatError` if a mean is missing, or does
    not decode to usable numbers.
    """
    me, what = attempt.me, attempt.contribution
    frames = {} if mean is None else {me: mean}
    frames |= attempt.swap(
        outgoing={} if mean is None else dict.fromkeys(attempt.receivers, mean),
        incoming=chunks,
        phase=2,
    )
    payloads = attempt.unpack(frames, chunks)
    # Decode before this rank votes "done": a mean that does not decode counts as missing.
    with tracing.span("decode", values=what.length):
        average, lost = _decoded(what, bounds, chunks, payloads)
    if lost:
        raise attempt.broken(lost)
    return average


def _decoded(
    what: Contribution,
    bounds: Mapping[str, tuple[int, int]],
    chunks: Mapping[str, Part],
    payloads: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, list[str]]:
    """Decode the chunks' `payloads`, by owner, into one tensor, flat fp32 [what.length].

    Also returns the owners whose chunk is missing, or does not decode to usable numbers, which is
    logged. The values of such a chunk are undefined.
    """
    whole, lost = torch.empty(0), [site for site in chunks if site not in payloads]
    for site, part in chunks.items():
        if site in lost:
            continue
        payload = what.staging.to_device(payloads[site])
        if not whole.numel():
            whole = torch.empty(what.length, dtype=torch.float32, device=payload.device)
        try:
            values = part.decode(payload, out=whole[slice(*bounds[site])])
            refuse_unusable(values, part.name)
        except ExchangeError as error:
            log.warning("%s, averaged by %s: %s", what.key.text, site, error)
            lost.append(site)
    return whole, lost


def _outcome(
    attempt: Attempt,
    result: torch.Tensor | None,
    counted: list[str],
    sent: torch.Tensor | None,
    second: tuple[int, torch.Tensor] | None = None,
) -> Outcome:
    return Outcome(result, tuple(counted), sent, second, attempt.sent_bytes, 0.0, 1)
