"""The estimate of link and steps: what moves it, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.run_config import ControlSection
from dilocox.coordinator.controller.link_estimator import (
    RISE,
    Estimate,
    Sample,
    declared,
    estimated,
)

MEASURED = ControlSection(adapt="link")
START = Estimate(100_000, 1_000_000, 0, 50_000)


def sample(payload: int, time_us: int, step_us: int = 100_000, count: int = 4) -> Sample:
    return Sample(step_us, payload * count, time_us * count, count)


def after(*samples: Sample, before: Estimate | None = START) -> Estimate | None:
    for each in samples:
        before = estimated(before, [each], MEASURED)
    return before


def known(rate: int, latency_us: int, last: tuple[int, int], step_us: int = 100_000) -> Estimate:
    """Of a link whose last swap, bytes and microseconds, is the smallest as well."""
    return Estimate(step_us, rate, latency_us, last[0], least=last)


def test_the_first_measurement_is_taken_as_it_is() -> None:
    assert after(sample(50_000, 25_000), before=None) == known(2_000_000, 0, (50_000, 25_000))


def test_the_slowest_link_and_the_slowest_step_count() -> None:
    samples = [sample(50_000, 25_000, 300_000), sample(50_000, 100_000, 200_000)]
    found = estimated(None, samples, MEASURED)
    assert found == known(500_000, 0, (50_000, 100_000), step_us=300_000)


@pytest.mark.parametrize(
    ("time_us", "rate"),
    [
        (50_000, 1_000_000),  # as predicted
        (62_500, 1_000_000),  # within the band
        (40_000, 1_000_000),
        (62_600, 798_722),  # beyond it: at once
        (500_000, 100_000),
        (25_000, 2_000_000),
        (5_000, 4_000_000),  # upwards in steps
    ],
)
def test_a_band_and_what_leaves_it(time_us: int, rate: int) -> None:
    found = after(sample(50_000, time_us))
    assert found is not None
    assert (found.rate, found.latency_us) == (rate, 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1_000, 10**9),
    st.lists(st.tuples(st.floats(0.9, 1.1), st.floats(0.9, 1.1)), min_size=2, max_size=20),
)
def test_noise_of_ten_per_cent_moves_nothing(rate: int, noise: list[tuple[float, float]]) -> None:
    found = None
    seen = set()
    for link, step in noise:
        time_us = round(1e6 * 10**6 / rate * link) + 1
        found = estimated(found, [sample(10**6, time_us, round(10**6 * step))], MEASURED)
        seen.add(found)
    assert len(seen) == 1


def test_steps_and_work_vary_more() -> None:
    def told(step_us: int, work_us: int) -> tuple[int, int]:
        before = Estimate(100_000, 1_000_000, 0, 50_000, work_us=3_000)
        found = estimated(before, [Sample(step_us, 200_000, 200_000, 4, 0, work_us)], MEASURED)
        assert found is not None
        return found.step_us, found.work_us

    assert told(149_000, 4_400) == told(80_000, 2_001) == (100_000, 3_000)
    assert told(151_000, 4_600) == (151_000, 4_600)
    # A landing some steps later comes too early if these are shorter than thought.
    assert told(79_000, 1_900) == (79_000, 1_900)


def test_two_sizes_tell_latency_and_rate_apart() -> None:
    """100 ms a payload and a megabyte per second, which one size cannot tell apart."""
    found = after(sample(50_000, 150_000), before=None)
    assert found is not None
    assert found.latency_us == 0
    found = after(sample(10_000, 110_000), before=found)
    assert found is not None
    # A smaller payload that takes longer than in proportion raises no hopes of the rate.
    assert found.rate == 333_333
    assert found.transfer_us(10_000) == pytest.approx(110_000, rel=0.001)
    found = after(sample(200_000, 300_000), before=found)
    assert found is not None
    assert found.rate == pytest.approx(1_000_000, rel=0.01)
    assert found.latency_us == pytest.approx(100_000, rel=0.01)


def test_a_link_that_slows_down_after_a_change_of_size_is_no_latency() -> None:
    settled = after(sample(10_000, 10_000))  # a smaller payload, as predicted
    slower = after(sample(10_000, 100_000), before=settled)
    assert slower == known(100_000, 0, (10_000, 100_000))
    # More bytes in less time, fewer in more: the link itself has changed.
    assert after(sample(200_000, 30_000)) == known(RISE * 1_000_000, 0, (200_000, 30_000))
    assert after(sample(10_000, 90_000)) == known(111_111, 0, (10_000, 90_000))


def test_fewer_bytes_in_the_same_time_are_no_slower_link() -> None:
    """Half a megabyte took half a second; a fifth of it, and three quarters, take that, too."""
    for payload in (10_000, 37_000):
        found = after(sample(payload, 50_000))
        assert found is not None
        assert found.rate == START.rate
        assert found.transfer_us(payload) == 50_000
    # Where bytes are nearly nothing of it, a busier moment does not make the link much slower.
    far = Estimate(100_000, 100_000_000, 50_000, 50_000)
    found = after(sample(50_000, 65_000), before=far)
    assert found is not None
    assert found.rate >= far.rate / 10
    assert found.transfer_us(50_000) == pytest.approx(65_000, rel=0.001)


def test_more_bytes_in_the_same_time_are_a_faster_link() -> None:
    """And no shorter latency, whichever plan came between: a plan whose smaller swaps could not
    hide would seem to hide again."""
    slow = after(sample(8_000, 50_000), sample(8_000, 50_000), before=None)
    larger = after(sample(20_000, 50_000), before=slow)
    assert larger is not None
    assert larger.rate == RISE * 160_000
    assert larger.latency_us == 50_000 - 31_250
    settled = after(*[sample(size, 50_000) for size in (40_000, 80_000, 160_000)], before=larger)
    assert settled is not None
    assert settled.least == (8_000, 50_000)
    # Less than expected for the same bytes, but as much as for fewer: it is not the latency.
    quicker = after(sample(160_000, 44_000), before=replace(settled, latency_us=50_000))
    assert quicker is not None
    assert quicker.transfer_us(8_000) > 40_000
    # What takes less than fewer bytes did says that the link is another one.
    other = after(sample(160_000, 20_000), before=settled)
    assert other is not None
    assert other.least == (160_000, 20_000)
    assert other.transfer_us(8_000) <= 20_000


def test_work_is_known_by_codec() -> None:
    def told(*rounds: tuple[str, int]) -> Estimate:
        found, earlier = None, []
        for codec, work in rounds:
            samples = [Sample(100_000, 200_000, 200_000, 4, 0, work, codec)]
            found = estimated(found, samples, MEASURED, earlier)
            earlier = samples
        assert found is not None
        return found

    assert told(("int4", 10_000)).work_of("topk:5") == 10_000  # nothing else is known
    # A dearer kind is believed when two of its rounds say so, and changes nothing of the other's.
    once = told(("int4", 10_000), ("topk:5", 25_000))
    assert (once.work_of("topk:64"), once.work_of("int4")) == (10_000, 10_000)
    twice = told(("int4", 10_000), ("topk:5", 25_000), ("topk:7", 24_000))
    assert (twice.work_of("topk:64"), twice.work_of("int4")) == (24_000, 10_000)
    # A machine that gets slower does so with every codec.
    slow = told(
        *(("int4", 10_000), ("topk:5", 25_000), ("topk:5", 25_000)),
        *(("topk:5", 75_000), ("topk:5", 75_000)),
    )
    assert (slow.work_of("topk:5"), slow.work_of("int4")) == (75_000, 30_000)
    # Another density of top-k is no other machine.
    dense = told(
        *(("int4", 10_000), ("topk:29", 10_000), ("topk:29", 10_000)),
        *(("topk:328", 90_000), ("topk:328", 90_000)),
    )
    assert [dense.work_of(codec) for codec in ("int4", "topk:20", "topk:232")] == [
        10_000, 10_000, 90_000,
    ]  # fmt: skip
    # Without codecs, as it was: one number.
    assert told(("", 10_000), ("", 30_000), ("", 30_000)).work_of("topk:5") == 30_000


def test_the_overhead_of_an_exchange_is_a_rough_number() -> None:
    def overheads(*measured: int) -> list[int]:
        found, estimate = [], None
        for least in measured:
            samples = [
                Sample(100_000, 200_000, 200_000, 4, overhead)
                for overhead in (least, least + 70_000)  # the second site came earlier, and waited
            ]
            estimate = estimated(estimate, samples, MEASURED)
            assert estimate is not None
            found.append(estimate.overhead_us)
        return found

    assert overheads(0, 3, 0) == [0, 4, 0]
    assert overheads(25_000) == [32_768]
    # Noise changes nothing, wherever it begins.
    for first in range(1000, 3000, 37):
        assert len(set(overheads(*(first * share // 100 for share in (110, 90, 100))))) == 1
        assert len(set(overheads(*(first * share // 100 for share in (90, 110, 100))))) == 1
    assert overheads(20_000, 33_000, 8_000) == [32_768, 65_536, 16_384]


def test_what_was_not_measured_changes_nothing() -> None:
    assert estimated(START, [], MEASURED) == START
    assert estimated(START, [Sample(100_000, 0, 0, 0)], MEASURED) == START
    assert estimated(None, [Sample(100_000, 0, 0, 0)], MEASURED) is None


def test_steps_are_measured_where_no_transfer_was() -> None:
    slower = [Sample(300_000, 0, 0, 0)]
    found = estimated(START, slower, MEASURED, earlier=slower)
    assert found == replace(START, step_us=300_000)


def test_what_is_declared_is_not_estimated() -> None:
    both = ControlSection(adapt="link", link="8mbit", step_seconds=0.5)
    assert declared(both) == Estimate(500_000, 1_000_000, 0, 0)
    link = ControlSection(adapt="link", link="8mbit")
    assert declared(link) is None
    assert estimated(None, [sample(50_000, 1)], link) == Estimate(100_000, 1_000_000, 0, 0)
    steps = ControlSection(adapt="link", step_seconds=0.5)
    found = estimated(None, [sample(50_000, 50_000)], steps)
    assert found == known(1_000_000, 0, (50_000, 50_000), step_us=500_000)
