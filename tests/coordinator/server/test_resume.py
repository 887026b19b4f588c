"""What is in force again after a resume, beside plans and ranges (see test_core_log)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.exchange_votes import Exchange
from dilocox.coordinator.server.resume import usual_at
from dilocox.coordinator.server.state import CoordinatorState
from tests.support.coordinator_driver import Driver, run_config

pytestmark = pytest.mark.waits


def three_rounds(folder: Path, delay: int) -> CoordinatorState:
    """Four slots and two fragments each, all decided, the flush too. The gate's running mean of
    fragment f after round r is 100 (r + 1) + f."""
    driver = Driver(folder, run_config("ab"))
    driver.start()
    plan, state = driver.plan(0, "a"), driver.core.state
    assert plan is not None
    for round_ in range(4):
        kind = "flush" if round_ == 3 else "train"
        changes = {"round": round_, "first_tick": 4 * round_, "delay": delay, "kind": kind}
        state.plans[round_] = plan.model_copy(update={**changes, "slots": 4, "fragments": 2})
        for fragment in (0, 1):
            key = m.ExchangeKey.outer(round_, 0, fragment).text
            before = 100 * round_ + fragment if round_ else None
            exchange = Exchange(key, round_, 0, 1, [], decision=["a", "b"], usual_before=before)
            state.exchanges[key] = exchange
            state.usual[exchange.place] = 100 * (round_ + 1) + fragment
    driver.core.close()
    return state


@pytest.mark.parametrize(
    ("delay", "tick", "first", "second"),
    [
        # Boundaries at 2, 6, 10 and at 4, 8, 12; landings three slots later.
        (3, 1, None, None),
        (3, 4, None, None),
        (3, 5, 100, None),
        (3, 8, 100, 101),
        (3, 9, 200, 101),
        (3, 12, 200, 201),
        # Later than the next boundary, where it lands at the latest.
        (6, 5, None, None),
        (6, 6, 100, None),
        (6, 7, 100, None),
        (6, 12, 200, 201),
    ],
)
def test_running_means_are_those_of_what_had_landed(
    tmp_path: Path, delay: int, tick: int, first: int | None, second: int | None
) -> None:
    state = three_rounds(tmp_path, delay)
    assert usual_at(state, tick) == {"0/0": first, "0/1": second}
    assert state.usual == {"0/0": 400, "0/1": 401}, "the state itself is as it was"
