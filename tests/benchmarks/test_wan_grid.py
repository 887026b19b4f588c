"""Which measurements there are, how long they take, and on which links, against numbers by hand."""

from __future__ import annotations

import pytest
from benchmarks.wan import grid as wan_grid
from benchmarks.wan.grid import (
    ALONE,
    BY_NAME,
    FULL,
    METHODS,
    NONE,
    OURS,
    QUICK,
    RATIO,
    SHORT,
    SHORT_MINUTES,
    SLOWEST,
    START_SECONDS,
    Case,
    Extent,
    Method,
    cases,
    duration,
    link_of,
    synchronous_bits,
)
from hypothesis import given
from hypothesis import strategies as st

TINY = Extent(3, 2, 2, 1, 100, 50, (40, 400, 4000), (2, 4), ("allreduce", OURS, "ddp"))


def test_a_link_of_ratio_400_takes_400_steps_for_the_gradients() -> None:
    # 1,000,000 parameters, two sites: 4 MB each way in 1448-byte segments of 1514-byte frames.
    bits = synchronous_bits(1_000_000, 2)
    assert bits == pytest.approx(4e6 * 8 * 1514 / 1448)
    assert synchronous_bits(1_000_000, 4) == pytest.approx(1.5 * bits)
    # 33.46 Mbit over 400 x 0.05 s = 1.673 Mbit/s, rounded down to two digits.
    assert link_of(400, 1_000_000, 2, 0.05) == pytest.approx(1.6e6)


@given(
    ratio=st.sampled_from([4, 40, 400, 4000]),
    parameters=st.integers(10_000, 10**9),
    sites=st.integers(2, 8),
    step=st.floats(1e-3, 10.0),
)
def test_a_link_reaches_its_ratio_and_is_off_by_a_tenth_at_most(
    ratio: int, parameters: int, sites: int, step: float
) -> None:
    rate = link_of(ratio, parameters, sites, step)
    reached = synchronous_bits(parameters, sites) / rate / step
    assert ratio * 0.999 <= reached <= ratio * 1.101


def test_a_measurement_takes_as_many_cycles_as_its_method_needs() -> None:
    synchronous = Method("a", "engine", 1)
    # A step and 400 steps' time on the link.
    assert synchronous.cycle_steps(400) == 401
    assert synchronous.cycles(400, 600) == 2
    assert synchronous.cycles(4000, 600) == 1
    beside = Method("b", "engine", 125, bits=3.2, overlaps=True)
    assert beside.cycle_steps(400) == 125
    assert beside.cycle_steps(4000) == pytest.approx(400)


def test_blocks_are_interleaved_and_every_second_one_is_backwards() -> None:
    found = [c for c in cases(TINY) if (c.sites, c.ratio) == (2, RATIO)]
    assert [(c.method, c.block) for c in found] == [
        (NONE, 0),
        (OURS, 0),
        ("allreduce", 0),
        ("ddp", 0),
        (ALONE, 0),
        (ALONE, 1),
        ("ddp", 1),
        ("allreduce", 1),
        (OURS, 1),
        (NONE, 1),
        (NONE, 2),
        (OURS, 2),
    ]


def test_other_links_are_measured_less_often_and_more_sites_on_one_link() -> None:
    found = cases(TINY)
    assert {c.ratio for c in found if c.sites == 4} == {RATIO}
    faster = [c for c in found if c.sites == 2 and c.ratio == 40]
    assert [c.method for c in faster] == [NONE, OURS, "allreduce", ALONE, "ddp", OURS, NONE]
    # No peer where a step of its own takes minutes.
    slowest = [c for c in found if c.sites == 2 and c.ratio == 4000]
    assert [c.method for c in slowest] == [NONE, OURS, "allreduce", OURS, NONE]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("sites", "ratio"), [(2, RATIO), (2, 40), (2, 4000), (4, RATIO)])
def test_a_full_run_measures_each_method_as_often_as_it_says(sites: int, ratio: int) -> None:
    found = [c for c in cases(FULL) if (c.sites, c.ratio) == (sites, ratio)]
    main = (sites, ratio) == (2, RATIO)
    for method in METHODS:
        often = [c.block for c in found if c.method == method.name]
        if method.adapts:
            assert len(often) == (FULL.core_blocks if main else FULL.core_blocks_elsewhere)
        elif ratio > RATIO and method.name not in SLOWEST:
            assert not often
        else:
            assert len(often) == (FULL.other_blocks if main else FULL.other_blocks_elsewhere)
    for block in {c.block for c in found}:
        # Nothing is far from its reference.
        assert len([c for c in found if c.block == block]) <= 8


@pytest.mark.parametrize("extent", [FULL, SHORT])
def test_every_block_has_its_reference(extent: Extent) -> None:
    found = cases(extent)
    blocks = {(c.sites, c.ratio, c.block) for c in found}
    for sites, ratio, block in blocks:
        inside = {c.method for c in found if (c.sites, c.ratio, c.block) == (sites, ratio, block)}
        if OURS in inside:
            assert NONE in inside
        if any(BY_NAME[m].kind == "peer" for m in inside if m in BY_NAME):
            assert ALONE in inside


def test_peers_and_methods_are_those_that_were_asked_for() -> None:
    peers = {m.name for m in METHODS if m.kind == "peer"}
    assert peers == {"ddp", "ddp-powersgd", "torchft-diloco", "torchft-streaming"}
    folder = wan_grid.__file__.rpartition("/")[0]
    for method in METHODS:
        if method.kind == "peer":
            with open(f"{folder}/peers/{method.script}.py", encoding="utf-8") as script:
                assert "dilocox" not in script.read()


def test_tokens_per_step_are_the_same_for_any_number_of_sites() -> None:
    assert {wan_grid.batch(sites) * sites for sites in (2, 4)} == {wan_grid.SEQUENCES}


def test_how_long_a_measurement_takes_by_hand() -> None:
    extent = Extent(1, 1, 1, 1, 100, 50, (400,), (2,), ())
    steps = {
        # Four rounds of 200 steps.
        NONE: 800,
        # 50 that are not measured, 50 that are.
        ALONE: 100,
        # 100 steps and 8.2 bits per value at the end, a quarter of 400 steps' 32.
        OURS: 100 + 102.5,
        # One step to warm up and one measured, each with 400 on the link.
        "allreduce": 802,
        # 3 + 4 cycles of 13.5 (the least of 50 is reached with four), two dense steps before.
        "ddp-powersgd": 7 * 13.5 + 800,
    }
    for method, expected in steps.items():
        found = duration(Case(2, 400, method, 0), extent, 0.05)
        assert found == pytest.approx(START_SECONDS + 0.05 * expected), method


def test_a_quick_run_fits_its_time_on_steps_of_62_ms() -> None:
    """As long as they are on the machine of the committed results."""
    lasts = sum(duration(case, SHORT, 0.062) for case in cases(SHORT))
    assert lasts / 60 < SHORT_MINUTES
    assert {case.method for case in cases(SHORT)} == {NONE, ALONE, *QUICK}
