"""The published grid: ratios of its links, shares within blocks, and the order of a block."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.published_grid import DILOCO, DILOCOX, INNER_STEPS, NONE

from benchmarks import published_grid


def test_ratios_follow_from_the_published_bandwidth_for_three_quarters() -> None:
    # At 937 Mbit/s an exchange takes a third of the time of its 128 steps.
    for cell, megabits in zip(published_grid.CELLS, (1000, 200), strict=True):
        assert cell.ratio == pytest.approx(INNER_STEPS / 3 * 937 / megabits, rel=0.001)


def test_no_cell_has_a_larger_share_than_its_link_allows() -> None:
    for cell in published_grid.CELLS:
        assert cell.published_share < INNER_STEPS / (INNER_STEPS + cell.ratio)


def run(method: str, block: int, speed: float, **fields: Any) -> dict[str, Any]:
    named = {"published_link": "1 Gbit/s", "method": method, "block": block}
    plan = {"inner_steps": 128.0, "payload_bytes": 1000.0, "plan": "p", "reason": "r"}
    return {**named, "tokens_per_second": speed, **plan, **fields}


def test_shares_are_taken_within_blocks() -> None:
    runs = [
        *(run(NONE, block, speed) for block, speed in enumerate((100.0, 200.0, 50.0))),
        *(run(DILOCO, block, speed) for block, speed in enumerate((70.0, 150.0, 36.0))),
        run(DILOCOX, 0, 98.0),
        # A block without its reference does not count.
        run(DILOCOX, 7, 10.0),
    ]
    diloco, ours = published_grid.rows(runs)
    assert (diloco["share"], diloco["share_low"], diloco["share_high"]) == (0.72, 0.7, 0.75)
    assert diloco["published"] == 0.7152
    assert (ours["share"], ours["share_low"], ours["blocks"]) == (0.98, None, 1)
    assert "- 1 Gbit/s, block 0: p: r" in published_grid.table(runs)


def test_every_second_block_is_in_reverse_order() -> None:
    assert published_grid.order(0) == (NONE, DILOCO, DILOCOX)
    assert published_grid.order(1) == (DILOCOX, DILOCO, NONE)
