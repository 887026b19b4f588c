"""Estimates the link and steps of the slowest site from the sites' measurements.

The estimate stays the same while measurements agree with it within `BAND`, so that noise has no
effect. Beyond the band the rate follows at once, upwards by at most a factor of `RISE` per round. A
plan for too fast a link costs waiting; a plan for too slow a link costs only a round. Times of
steps, work and overhead follow only if two rounds in a row agree on the change. A machine that was
busy for a moment, for example with a checkpoint, is not slower for that.

A swap, in which a site receives from all others at the same time, takes `latency + bytes / rate`.
Latency and rate can be told apart only after swaps of different sizes. Until then all of the time
counts as transfer, which predicts too long a time for larger swaps.

Codecs need different amounts of computation, so work is known by codec. A plan that was dropped for
the work of its codec is not chosen again because another codec needs less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dilocox.config.codec_spec import parse_spec
from dilocox.config.outer import ControlSection

BAND = (5, 4)
"""A measurement agrees with the estimate up to this ratio in either direction: noise of +-10 %
passes."""
ROUGH = (3, 2)
"""`BAND` for work times, which vary more than links and matter less, and for steps that became
longer. Shorter steps use `BAND`: they leave less time for exchanges, so they matter more."""
RISE = 4
"""The estimated rate rises at most by this factor per round."""
_SECOND = 1_000_000


@dataclass(frozen=True)
class Sample:
    """Measurements of one site in one round, in integer microseconds and bytes.

    `round_plan.Measured` explains the fields.
    """

    step_us: int
    exchange_bytes: int
    exchange_us: int
    exchanges: int
    overhead_us: int = 0
    """Microseconds per exchange in which no payload arrived."""
    work_us: int = 0
    codec: str = ""
    """Codec of the round; empty: not known."""
    fragments: int = 0
    """Number of fragments of the round; 0: not known."""


@dataclass(frozen=True)
class Estimate:
    """Estimate from which plans are made; times in microseconds, `rate` in bytes per second."""

    step_us: int
    """Microseconds of an inner step."""
    rate: int
    """Bytes per second that a site receives."""
    latency_us: int
    """Microseconds of a swap in addition to the time of its bytes."""
    payload: int
    """Bytes of a swap in the latest measurement."""
    overhead_us: int = 0
    """Microseconds of an exchange in addition to its transfers, in the last measured round. A power
    of two, because it is a rough number."""
    overheads: Mapping[int, int] = field(default_factory=dict, hash=False)
    """`overhead_us` by number of fragments, for the numbers that were used."""
    work_us: int = 0
    """Microseconds of training time that all exchanges of the last measured round took, waits not
    counted."""
    works: Mapping[str, int] = field(default_factory=dict, hash=False)
    """`work_us` by codec, for the codecs that were used."""
    lag_us: int = 0
    """Microseconds by which an inner step of the slowest site is longer than one of the fastest. A
    site may come early or late to a landing by this time."""
    least: tuple[int, int] = (0, 0)
    """Bytes and microseconds of the smallest swap since the link last changed. Zeros: none yet."""

    def transfer_us(self, payload: int) -> int:
        """Return the microseconds of a swap of `payload` bytes."""
        return self.latency_us + -(-payload * _SECOND // self.rate)

    def overhead_of(self, fragments: int) -> int:
        """Return the microseconds per exchange, beside its transfers, with this many fragments.

        For numbers that were not used, the worst case is assumed. With fewer fragments, all of the
        overhead is encoding and decoding, which grow with a fragment's size. With more fragments,
        the overhead stays the same. So the controller does not swing between two numbers.
        """
        if not fragments or not self.overheads:
            return self.overhead_us
        if fragments in self.overheads:
            return self.overheads[fragments]
        more = [number for number in self.overheads if number > fragments]
        if more:
            return -(-self.overheads[min(more)] * min(more) // fragments)
        return self.overheads[max(self.overheads)]

    def work_of(self, codec: str) -> int:
        """Return the microseconds that a round's exchanges with `codec` take from training.

        For a codec that was not used, the value is that of the codec of its kind with the nearest
        density. Without such a codec it is that of the last round.
        """
        spec = parse_spec(codec)
        alike = [name for name in self.works if parse_spec(name).kind == spec.kind]
        if not alike:
            return self.work_us

        def apart(name: str) -> float:
            return abs(math.log(max(0.1, parse_spec(name).density) / max(0.1, spec.density)))

        return self.works[min(alike, key=apart)]


def declared(control: ControlSection) -> Estimate | None:
    """Return the estimate that the run file declares, or None if something has to be measured."""
    if control.link_rate is None or control.step_seconds is None:
        return None
    return Estimate(max(1, round(control.step_seconds * _SECOND)), control.link_rate, 0, 0)


def estimated(
    before: Estimate | None,
    samples: Iterable[Sample],
    control: ControlSection,
    earlier: Iterable[Sample] = (),
) -> Estimate | None:
    """Return the estimate after one more round, or None while nothing is known.

    Args:
        before: The estimate so far.
        samples: Measurements of all sites in the round.
        control: The run file's section; values that it declares are not estimated.
        earlier: Measurements of the round before.
    """
    samples, earlier = list(samples), list(earlier)
    if not samples:
        return before
    step_us, _, beside_us = _times(samples)
    if before is not None and earlier:
        once, _, besides = _times(earlier)
        step_us = _middle(before.step_us, once, step_us)
        if earlier[0].fragments == samples[0].fragments:
            beside_us = _middle(before.overhead_of(samples[0].fragments), besides, beside_us)
    if control.step_seconds is not None:
        step_us = round(control.step_seconds * _SECOND)
    elif before is not None and _agrees(
        step_us, before.step_us, ROUGH if step_us > before.step_us else BAND
    ):
        step_us = before.step_us
    work_us, works = _work(before, samples, earlier)
    if control.link_rate is not None:
        return Estimate(max(1, step_us), control.link_rate, 0, 0, work_us=work_us, works=works)
    heard = [s for s in samples if s.exchange_us > 0 and s.exchanges > 0 and s.exchange_bytes > 0]
    if not heard:
        return None if before is None else replace(before, step_us=max(1, step_us))
    overhead, overheads = _overheads(before, beside_us, samples[0].fragments)
    # The slowest link has the fewest bytes per second.
    worst = min(heard, key=lambda sample: sample.exchange_bytes / sample.exchange_us)
    payload = max(1, worst.exchange_bytes // worst.exchanges)
    time_us = max(1, worst.exchange_us // worst.exchanges)
    rate, latency, size = _link(before, payload, time_us)
    least = _least(before, payload, time_us)
    return Estimate(
        max(1, step_us), max(1, rate), latency, size, overhead, overheads, work_us, works,
        least=least,
    )  # fmt: skip


def _times(samples: Sequence[Sample]) -> tuple[int, int, int]:
    """Return step time, work and overhead of one round, in microseconds.

    Step time and work are each the largest of any site. The overhead is the smallest of any site:
    that of the site which came last to its exchanges and did not wait for others.
    """
    return (
        max(sample.step_us for sample in samples),
        max(sample.work_us for sample in samples),
        min(sample.overhead_us for sample in samples),
    )


def _work(
    before: Estimate | None, samples: Sequence[Sample], earlier: Sequence[Sample]
) -> tuple[int, Mapping[str, int]]:
    """Return the work of the last round's exchanges, and the work by codec.

    If the work of a known codec has changed, the cause is the machine. So the values of the other
    codecs are scaled by the same ratio.
    """
    codec, (_, work_us, _) = samples[0].codec, _times(samples)
    if before is None:
        return work_us, {codec: work_us} if codec else {}
    known = before.work_of(codec) if codec else before.work_us
    again = bool(earlier) and _kind(earlier[0].codec) == _kind(codec)
    if earlier:
        # A change counts if two rounds in a row, with codecs of the same kind, agree on it.
        work_us = _middle(known, _times(earlier)[1] if again else known, work_us)
    if _agrees(work_us, known, ROUGH):
        work_us = known
    if codec in before.works and known:
        scaled = {name: value * work_us // known for name, value in before.works.items()}
        return work_us, {**scaled, codec: work_us}
    if codec and again and (earlier[0].codec == codec or work_us != known):
        return work_us, {**before.works, codec: work_us}
    return work_us, before.works


def _kind(codec: str) -> str:
    return parse_spec(codec).kind if codec else ""


def _middle(*three: int) -> int:
    return sorted(three)[1]


def _overheads(
    before: Estimate | None, measured: int, fragments: int
) -> tuple[int, Mapping[int, int]]:
    """Return the overhead of an exchange, and the overhead by number of fragments.

    If the overhead of a known number has changed, the cause is the machine or the network. So the
    values of the other numbers are scaled by the same ratio.
    """
    if before is None:
        found = _overhead(0, measured)
        return found, {fragments: found} if fragments else {}
    known = before.overhead_of(fragments)
    found = _overhead(known, measured)
    others = before.overheads
    if fragments in others and known and found:
        others = {number: value * found // known for number, value in others.items()}
    return found, {**others, fragments: found} if fragments else others


def _overhead(known: int, measured: int) -> int:
    """Return a power of two above `measured` with some room, or `known` while that is near.

    0 if `measured` is 0.
    """
    if not measured:
        return 0
    if measured <= known <= 4 * measured and known.bit_count() == 1:
        return known
    wide, narrow = BAND
    return 1 << (measured * wide // narrow).bit_length()


def _agrees(value: int, known: int, band: tuple[int, int] = BAND) -> bool:
    wide, narrow = band
    return value * narrow <= known * wide and known * narrow <= value * wide


def _least(before: Estimate | None, payload: int, time_us: int) -> tuple[int, int]:
    """Return `Estimate.least` after a swap of `payload` bytes took `time_us` microseconds.

    A smaller new swap replaces the known swap. A larger new swap replaces the known swap if it took
    less time, which shows that the link has changed. A new swap of about the same size (`BAND`)
    replaces the known swap only if their times differ by more than `BAND`.
    """
    if before is None or before.least[0] == 0:
        return payload, time_us
    size, known_us = before.least
    alike, as_long = _agrees(payload, size), _agrees(time_us, known_us)
    changed = not as_long if alike else payload < size or (time_us < known_us and not as_long)
    return (payload, time_us) if changed else before.least


def _link(before: Estimate | None, payload: int, time_us: int) -> tuple[int, int, int]:
    """Return (rate, latency, payload) after a swap of `payload` bytes took `time_us`."""
    if before is None:
        return payload * _SECOND // time_us, 0, payload

    def beside(rate: int) -> int:
        """Return the time left for latency if bytes travel at `rate`; negative: rate too low."""
        return time_us - payload * _SECOND // rate

    predicted = before.transfer_us(payload)
    if _agrees(time_us, predicted):
        return before.rate, before.latency_us, payload
    faster = time_us < predicted
    most = before.rate * RISE if faster else before.rate
    usual = before.transfer_us(before.payload)
    more, longer = payload - before.payload, time_us - usual
    if not _agrees(payload, before.payload) and more < 0 and _agrees(time_us, usual):
        # Fewer bytes took the same time, so the bytes do not cause it. If this counted as a slower
        # link, the next payload would be smaller still, and so on.
        return before.rate, beside(before.rate), payload
    size, known_us = before.least
    if faster and payload > size > 0 and not _agrees(payload, size) and _agrees(time_us, known_us):
        # More bytes took as long as fewer did, so the bytes do not cause the time. If this counted
        # as less latency, short rounds would seem to hide, be tried and be dropped, repeatedly.
        return most, max(0, beside(most)), payload
    sizes = sorted((payload, before.payload))
    if sizes[0] > 0 and sizes[1] >= 2 * sizes[0] and faster == (more > 0) and more * longer > 0:
        # A larger swap took less time than in proportion, or a smaller one took more. So the two
        # sizes tell latency and rate apart.
        rate = max(1, min(most, more * _SECOND // longer))
        return rate, max(0, beside(rate)), payload
    if not faster and 2 * payload >= 3 * before.payload > 0 and longer > 0:
        # A larger swap took longer than expected. If the two sizes mean less latency and a lower
        # rate, the last measurement had less latency and was mistaken for a faster link.
        rate = max(1, more * _SECOND // longer)
        if rate < before.rate and 0 <= beside(rate) < before.latency_us:
            return rate, beside(rate), payload
    # Otherwise the link has changed. The latency may be wrong by the band, too: if it is nearly all
    # of the time, a little more latency must not count as a much slower link. And a swap that takes
    # less time than expected must not make the link slower.
    wide, narrow = BAND
    latency = before.latency_us * wide // narrow
    if faster:
        latency = min(before.latency_us * narrow // wide, time_us // 2)
        latency = max(latency, time_us - (predicted - before.latency_us))
    rate = payload * _SECOND // (time_us - latency)
    return min(rate, most), latency, payload
