"""A site fails before, while sending, while reducing; is slow in each; goes away in each.

After the matrix of hivemind's averaging tests: survivors go on without rolling back, hold one
anchor, have one decision on every contribution set, and lose nothing.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import EventLog
from tests.support.failing_sites import LINK, POINTS, SLOW, Fault, Kind, Point, config_of, run_sites

pytestmark = pytest.mark.waits

SURVIVORS = ("paris", "lyon")


@pytest.mark.parametrize(
    ("mode", "kind", "points"),
    [
        ("gather", "dies", POINTS),
        ("reduce", "dies", POINTS),
        pytest.param("gather", "leaves", POINTS, marks=pytest.mark.slow),
        ("reduce", "leaves", POINTS),
        pytest.param("gather", "slow", POINTS, marks=pytest.mark.slow),
        pytest.param("reduce", "slow", POINTS, marks=pytest.mark.slow),
        ("gather", "hangs", ("sending",)),
        pytest.param("reduce", "hangs", ("sending",), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_survivors_go_on_and_lose_nothing(
    tmp_path: Path, mode: str, kind: Kind, points: tuple[Point, ...]
) -> None:
    """One fault at each point, in rounds of their own; who is slow is the same site in all."""
    victims = ["rome"] * len(points) if kind == "slow" else [f"rome-{point}" for point in points]
    faults = [
        Fault(site, number, point, kind)
        for number, (site, point) in enumerate(zip(victims, points, strict=True), start=1)
    ]
    sites = [*SURVIVORS, *dict.fromkeys(victims)]
    config = config_of(tmp_path / "run", sites, mode, len(points) + 2)
    limits = Timeouts.derive(config.network)
    end = run_sites(config, faults, 3 * LINK)
    assert (end.phase, end.reason) == ("finished", ""), end.messages
    paris, lyon = (end.sites[site] for site in SURVIVORS)

    # One anchor and momentum after every round, and no round was lost or trained again.
    assert list(paris.digests) == [*range(len(points) + 2), -1]
    assert paris.digests == lyon.digests
    assert len(set(paris.digests.values())) == len(paris.digests)

    # Who is slow was waited for, and counts.
    late = end.sites["rome"].late if kind == "slow" else {}
    assert sorted(late) == [fault.round for fault in faults if kind == "slow"]
    assert all(paris.decided[f"outer/{round_}/0/0"] > at for round_, at in late.items())

    # Every set was decided once, is the same for all, and who failed is in none from there on.
    assert paris.sets == lyon.sets
    assert paris.averages == lyon.averages
    decided = decisions(config.folder / "coordinator")
    assert {key: list(members) for key, members in paris.sets.items()} == decided
    everywhere = {*SURVIVORS, "rome"} if kind == "slow" else set(SURVIVORS)
    assert all(everywhere <= set(members) for members in paris.sets.values())
    for fault in faults if kind != "slow" else ():
        rounds = {
            ExchangeKey.parse(k).round for k, set_ in paris.sets.items() if fault.site in set_
        }
        # The other fragment of the round before is under way at the same time.
        assert fault.round - 2 <= max(rounds) < fault.round, (fault, paris.sets)

    # What a survivor has trained was sent or is in its residual.
    for told in end.sites.values():
        for fragment, given in told.given.items():
            kept = told.sent[fragment] + told.residual[fragment]
            np.testing.assert_allclose(kept, given, atol=2e-6)
            assert np.abs(given).max() > 0.01

    # No wait was longer than what it waited for may take.
    longest = max(max(told.seconds.values()) for told in (paris, lyon))
    assert longest < limits.heartbeat + limits.grace + SLOW
    assert (end.ledger.doubled, end.ledger.missing) == (0, 0)
    numbers = [n for told in end.sites.values() for s, c in told.ranges for n in range(s, s + c)]
    assert len(numbers) == len(set(numbers))
    assert end.ledger.committed >= len(numbers)


def decisions(folder: Path) -> dict[str, list[str]]:
    """Contribution sets as the coordinator's log has them. Fails if one was decided twice."""
    log = EventLog(folder)
    try:
        found = [
            event
            for event in log.events()
            if isinstance(event, e.Decided) and event.decision == "commit"
        ]
    finally:
        log.close()
    assert max(Counter(event.key for event in found).values()) == 1
    return {event.key: list(event.set) for event in found}
