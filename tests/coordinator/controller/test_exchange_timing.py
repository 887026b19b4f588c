"""How long exchanges keep the link busy, against hand-made cases and a clock in small steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.controller.exchange_timing import Crowd, Traffic, together, traffic
from dilocox.coordinator.controller.link_estimator import Estimate
from dilocox.coordinator.protocol.round_plan import boundary_slots

LINK = Estimate(0, 1_000_000, 0, 0)
"""A byte per microsecond."""
PAIR = Crowd(2, "gather")


@pytest.mark.parametrize(
    ("crowd", "expected"),
    [
        (Crowd(2, "gather"), (1, 100)),
        (Crowd(4, "gather"), (1, 300)),
        (Crowd(2, "reduce"), (2, 50)),
        (Crowd(4, "reduce"), (2, 75)),
        (Crowd(3, "reduce"), (2, 68)),
    ],
)
def test_what_a_site_receives(crowd: Crowd, expected: tuple[int, int]) -> None:
    assert crowd.swaps(100) == expected


def test_fragments_with_the_link_to_themselves() -> None:
    # Boundaries at slots 2 and 4 of 4, each of 100 us: 100 and 150 us of transfer.
    assert traffic([[100, 150]], 4, 100, LINK, PAIR, 0) == Traffic(250, 250, 150)
    assert traffic([[100, 150]], 4, 100, LINK, PAIR, 20) == Traffic(250, 250, 170)
    slow = Estimate(0, 1_000_000, 0, 0, overhead_us=15)
    assert traffic([[100, 150]], 4, 100, slow, PAIR, 5) == Traffic(250, 250, 170)


def test_pieces_that_travel_together_have_one_header() -> None:
    sizes = [[100, 150, 200, 250], [70, 80, 90, 100]]
    assert together(sizes, 4, 1) == sizes
    assert together(sizes, 2, 1) == [[250 - 64, 450 - 64], [150 - 64, 190 - 64]]
    # Each shard has a frame of its own.
    assert together(sizes, 1, 2) == [[700 - 3 * 128], [340 - 3 * 128]]


def test_fragments_that_share_a_boundary_or_overtake_each_other() -> None:
    # One slot: both at its end.
    assert traffic([[100, 150]], 1, 300, LINK, PAIR, 0) == Traffic(250, 250, 250)
    # The first is not over when the second begins: 300 at 200, then 100 at 400 waits till 500.
    assert traffic([[300, 100]], 4, 100, LINK, PAIR, 0).latest_us == 300
    assert traffic([[300, 50]], 4, 100, LINK, PAIR, 0).latest_us == 300
    # The last of a round reaches into the next: 350 at 400 till 750; then 40 at 600 waits.
    assert traffic([[40, 350]], 4, 100, LINK, PAIR, 0).latest_us == 350
    assert traffic([[160, 230]], 4, 100, LINK, PAIR, 0).latest_us == 230
    # What passes beside transfers passes at all stages at once, half of it before them.
    both = traffic([[100, 100], [100, 100]], 4, 200, LINK, PAIR, 60)
    assert both == Traffic(400, 400, 160)
    # All at 400: ready at 430, transfers until 440, 450, 460 and 470, the last over at 500.
    assert traffic([[10, 10], [10, 10]], 1, 400, LINK, PAIR, 60) == Traffic(40, 70, 100)
    late = Estimate(0, 1_000_000, 10, 0, overhead_us=0)
    assert traffic([[100, 150]], 4, 200, late, Crowd(3, "gather"), 0) == Traffic(500, 520, 310)


def test_a_stage_has_two_exchanges_under_way() -> None:
    """Three at 100, of 10 us of transfer and 60 beside it: two are ready at 130, over at 170 and
    180; the third begins at 170, is ready at 200 and over at 240."""
    assert traffic([[10, 10, 10]], 1, 100, LINK, PAIR, 60) == Traffic(30, 105, 140)
    # Two threads can do no more than this in a round: with rounds of 200 it is for ever so.
    assert traffic([[10, 10, 10]], 1, 200, LINK, PAIR, 60) == Traffic(30, 105, 140)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(1, 40),
)
def test_against_a_clock_that_counts_microseconds(
    sizes: list[list[int]], slots: int, slot_us: int
) -> None:
    found = traffic(sizes, slots, slot_us, LINK, PAIR, 0)
    assert found.busy_us == found.payload_bytes == sum(map(sum, sizes))
    queue = 0
    latest = 0
    for now in range(2 * slots * slot_us + 1):
        # Whole slots end now; what their boundaries bring joins the queue, which drains by one.
        if now and now % slot_us == 0:
            slot = (now // slot_us - 1) % slots + 1
            arrived = sum(
                size
                for stage, row in enumerate(sizes)
                for size, due in zip(row, boundary_slots(stage, len(sizes), 3, slots), strict=True)
                if due == slot
            )
            queue += arrived
            if any(
                slot in boundary_slots(stage, len(sizes), 3, slots) for stage in range(len(sizes))
            ):
                latest = max(latest, queue)
        queue = max(0, queue - 1)
    assert found.latest_us == latest
