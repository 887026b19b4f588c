"""A site of several processes trains as one process would, for every schedule and sharding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.site.pool import Pool

SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_equal_single_process(
    pool: Pool, schedule: str, shards: int, checkpointing: bool
) -> None:
    for tied in (False, True):
        setting = {
            "stages": 2,
            "shards": shards,
            "schedule": schedule,
            "checkpointing": checkpointing,
            "tied": tied,
            "rows": 4 * shards,
        }
        check_gradients(pool, 2 * shards, setting)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble", "zbv"])
def test_gradients_equal_single_process_over_four_stages(pool: Pool, schedule: str) -> None:
    check_gradients(pool, 4, {"stages": 4, "schedule": schedule, "rows": 8, "tied": True})


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_gradients_equal_single_process_in_one_stage(pool: Pool, shards: int) -> None:
    check_gradients(pool, shards, {"shards": shards, "rows": 8, "tied": True})


def check_gradients(pool: Pool, ranks: int, setting: dict[str, Any]) -> None:
    results = pool.run(ranks, "tests.site.cases", "gradients", **setting)
    for result in results:
        assert result["worst"] < 2e-6
        for mine, single in result["norms"] + result["losses"]:
            assert mine == pytest.approx(single, rel=2e-6)
    # Not only close to the reference: the same bits on every rank.
    assert len({str((r["norms"], r["losses"])) for r in results}) == 1
