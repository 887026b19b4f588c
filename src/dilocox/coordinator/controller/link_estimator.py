"""The slowest site's link and steps, estimated from what sites measured in agreed rounds.

An estimate stays as it is while measurements agree with it within `BAND`, so that noise changes
nothing. Beyond it the rate follows at once, upwards by a factor of `RISE` a round at most: a plan
that is too bold costs waiting, one that is too timid only a round. Times of steps, of work and
beside the transfers follow what two rounds in a row say, whichever of them says less: a machine
that was busy elsewhere for a moment, with a checkpoint say, is not slower for that.

What a site receives in one swap, of all others at the same time, takes `latency + bytes / rate`.
The two are told apart when swaps of another size have been measured; until then all of the time
counts as transfer, which errs to the slow side for larger ones.

Codecs compute differently much, so work is known by codec: a plan that was given up for the work of
its codec is not taken up again because another codec's is less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dilocox.config.codec_spec import parse_spec
from dilocox.config.outer import ControlSection

BAND = (5, 4)
"""A measurement may differ from the estimate by this ratio, up or down: noise of +-10 % passes."""
ROUGH = (3, 2)
"""The same for work times, which vary more than links do and matter less, and for steps that take
longer than before. Ones that take less time leave less for an exchange that lands after some."""
RISE = 4
"""The estimated rate rises by this factor a round at most."""
_SECOND = 1_000_000


@dataclass(frozen=True)
class Sample:
    """What one site measured in one round. Whole numbers: microseconds and bytes."""

    step_us: int
    exchange_bytes: int
    exchange_us: int
    exchanges: int
    overhead_us: int = 0
    """Per exchange, in which nothing came in."""
    work_us: int = 0
    codec: str = ""
    """In force in that round; empty: not known."""
    fragments: int = 0
    """In that round; 0: not known."""


@dataclass(frozen=True)
class Estimate:
    """What plans go by; times in microseconds, `rate` in bytes per second."""

    step_us: int
    rate: int
    latency_us: int
    """Per swap, beside its bytes."""
    payload: int
    """Bytes of a swap as they were measured last."""
    overhead_us: int = 0
    """Per exchange, beside its transfers: a power of two, since it is a rough number. In the last
    round that was measured."""
    overheads: Mapping[int, int] = field(default_factory=dict, hash=False)
    """The same by the number of a round's fragments, of those that were in force."""
    work_us: int = 0
    """What training loses by the exchanges of a round beside waiting: the whole model once. In the
    last round that was measured."""
    works: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The same by codec, of those that were in force."""
    lag_us: int = 0
    """By so much an inner step of the slowest site is longer than one of the fastest: it comes as
    much early to a landing, or late."""
    least: tuple[int, int] = (0, 0)
    """The smallest swap known, bytes and microseconds: none that took less is known since."""

    def transfer_us(self, payload: int) -> int:
        """Microseconds that a swap of so many bytes takes."""
        return self.latency_us + -(-payload * _SECOND // self.rate)

    def overhead_of(self, fragments: int) -> int:
        """Microseconds per exchange beside its transfers in rounds of so many fragments.

        Of numbers that were not in force nothing is hoped for: that all of it is encoding and
        decoding, which grow with what a fragment holds if there are fewer, and that none of it is
        if there are more. So nothing swings between two numbers that look better from each other.
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
        """Microseconds that training loses by a round's exchanges of `codec`: by those of the one
        of its kind that keeps most nearly as many values, if there was none, by the last's."""
        spec = parse_spec(codec)
        alike = [name for name in self.works if parse_spec(name).kind == spec.kind]
        if not alike:
            return self.work_us

        def apart(name: str) -> float:
            return abs(math.log(max(0.1, parse_spec(name).density) / max(0.1, spec.density)))

        return self.works[min(alike, key=apart)]


def declared(control: ControlSection) -> Estimate | None:
    """The estimate of a run file that leaves nothing to be measured, or none."""
    if control.link_rate is None or control.step_seconds is None:
        return None
    return Estimate(max(1, round(control.step_seconds * _SECOND)), control.link_rate, 0, 0)


def estimated(
    before: Estimate | None,
    samples: Iterable[Sample],
    control: ControlSection,
    earlier: Iterable[Sample] = (),
) -> Estimate | None:
    """The estimate after one more round, whose `samples` are of all sites that measured it.

    `earlier` are those of the round before it. What `control` declares is not estimated. None
    while nothing is known.
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
    # The slowest link: least bytes per second.
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
    """Of one round: a step and the work at the slowest site, and what an exchange takes beside its
    transfers at the one that came last to it, which waited for nobody."""
    return (
        max(sample.step_us for sample in samples),
        max(sample.work_us for sample in samples),
        min(sample.overhead_us for sample in samples),
    )


def _work(
    before: Estimate | None, samples: Sequence[Sample], earlier: Sequence[Sample]
) -> tuple[int, Mapping[str, int]]:
    """What the last round's exchanges took from training, and that by codec.

    What is known of other codecs changes in the same proportion as that of one that was known: it
    is the machine that has.
    """
    codec, (_, work_us, _) = samples[0].codec, _times(samples)
    if before is None:
        return work_us, {codec: work_us} if codec else {}
    known = before.work_of(codec) if codec else before.work_us
    again = bool(earlier) and _kind(earlier[0].codec) == _kind(codec)
    if earlier:
        # What two rounds of a kind say in a row is believed.
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
    """What passes beside an exchange's transfers, and that by the number of fragments.

    What is known of other numbers changes in the same proportion as that of one that was known: it
    is the machine, or the way to the others, that has.
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
    """The power of two above `measured` with some room; the `known` one while it is near."""
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
    """The smallest swap known after one of `payload` bytes took `time_us`: this one, if it is
    smaller, or if it took less, which says that the link has changed since; of sizes within `BAND`
    the last whose time left it."""
    if before is None or before.least[0] == 0:
        return payload, time_us
    size, known_us = before.least
    alike, as_long = _agrees(payload, size), _agrees(time_us, known_us)
    changed = not as_long if alike else payload < size or (time_us < known_us and not as_long)
    return (payload, time_us) if changed else before.least


def _link(before: Estimate | None, payload: int, time_us: int) -> tuple[int, int, int]:
    """(rate, latency, payload) after a swap of `payload` bytes took `time_us`."""
    if before is None:
        return payload * _SECOND // time_us, 0, payload

    def beside(rate: int) -> int:
        """What is left of the time for latency if bytes travel at `rate`; below 0: too slow."""
        return time_us - payload * _SECOND // rate

    predicted = before.transfer_us(payload)
    if _agrees(time_us, predicted):
        return before.rate, before.latency_us, payload
    faster = time_us < predicted
    most = before.rate * RISE if faster else before.rate
    usual = before.transfer_us(before.payload)
    more, longer = payload - before.payload, time_us - usual
    if not _agrees(payload, before.payload) and more < 0 and _agrees(time_us, usual):
        # Fewer bytes in the same time: it is not bytes that take it. Were it taken for a slower
        # link, the next payload would be smaller still, and so on.
        return before.rate, beside(before.rate), payload
    size, known_us = before.least
    if faster and payload > size > 0 and not _agrees(payload, size) and _agrees(time_us, known_us):
        # As long as fewer bytes took: likewise. Were it taken for less latency, short rounds that
        # could not hide would seem to again, be tried and given up, and so on.
        return most, max(0, beside(most)), payload
    sizes = sorted((payload, before.payload))
    if sizes[0] > 0 and sizes[1] >= 2 * sizes[0] and faster == (more > 0) and more * longer > 0:
        # A larger swap that took less than in proportion, or a smaller one that took more: the
        # two sizes tell latency and rate apart.
        rate = max(1, min(most, more * _SECOND // longer))
        return rate, max(0, beside(rate)), payload
    if not faster and 2 * payload >= 3 * before.payload > 0 and longer > 0:
        # A larger swap that took more than expected: where the two sizes say less latency and a
        # lower rate, the last measurement was of less latency and was taken for a faster link.
        rate = max(1, more * _SECOND // longer)
        if rate < before.rate and 0 <= beside(rate) < before.latency_us:
            return rate, beside(rate), payload
    # Else the link has changed. What passes beside the bytes may be off by the band, too: where it
    # is nearly all of the time, a little more of it must not be taken for a much slower link. And
    # no swap that takes less time than expected makes the link a slower one.
    wide, narrow = BAND
    latency = before.latency_us * wide // narrow
    if faster:
        latency = min(before.latency_us * narrow // wide, time_us // 2)
        latency = max(latency, time_us - (predicted - before.latency_us))
    rate = payload * _SECOND // (time_us - latency)
    return min(rate, most), latency, payload
