"""What is made of a run's records and of what interfaces have counted; worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.netns import Counters
from dilocox.tools.testbed.results import (
    Recording,
    RunResult,
    between,
    result_of,
    rounds_by_site,
    window_of,
)
from dilocox.tools.testbed.testbed import HUB

pytestmark = pytest.mark.alone

SITES = ["paris", "lyon"]


def records(rounds: int, seconds: float = 2.0) -> list[dict[str, Any]]:
    """Rounds of 2 s that end at 102, 104, ...; lyon reports half a second later."""
    found: list[dict[str, Any]] = [{"kind": "message", "text": "running"}]
    for number in range(rounds):
        for place, site in enumerate(SITES):
            found.append(
                {
                    "kind": "round",
                    "site": site,
                    "round": number,
                    "step": 10 * (number + 1),
                    "time": 100.0 + seconds * (number + 1) + 0.5 * place,
                    "tokens": 1000,
                    "wait_seconds": 1.5 if number < 2 else 0.2,
                    "payload_bytes": 50,
                }
            )
        found.append({"kind": "round", "round": number, "time": 0.0})
    found += [{"kind": "flush", "site": site, "payload_bytes": 400} for site in SITES]
    return found


def counted(paris: int, lyon: int, hub: int) -> dict[str, Counters]:
    return {
        "paris": Counters(paris, paris + 7, 0, 0, 0),
        "lyon": Counters(lyon, lyon + 9, 0, 0, 0),
        HUB: Counters(3 * hub, hub, 0, 0, 0),
    }


def result(rounds: int = 5) -> RunResult:
    # Evenly 100 bytes a second from paris, 200 from lyon, of which 10 in all go to the hub.
    samples = [
        (when, counted(100 * t, 200 * t, 10 * t))
        for t, when in ((t, 100.0 + t) for t in range(2 * rounds + 3))
    ]
    return result_of(
        "run",
        "dilocox",
        SITES,
        HUB,
        Recording(records(rounds), samples, {}, Path("x")),
        warm_up=2,
    )


def test_the_first_rounds_are_left_out_and_time_is_the_walls() -> None:
    found = result()
    # From lyon's report of round 1, at 104.5, to its report of round 4, at 110.5.
    assert (found.window.first, found.window.last, found.window.rounds) == (2, 4, 3)
    assert found.window.seconds == pytest.approx(6.0)
    paris = found.sites["paris"]
    assert paris.tokens_per_second == pytest.approx(3 * 1000 / 6.0)
    assert found.tokens_per_second == pytest.approx(2 * 3 * 1000 / 6.0)
    assert paris.wait_share == pytest.approx(3 * 0.2 / 6.0)


def test_bytes_are_those_of_the_whole_run_and_those_of_the_window() -> None:
    found = result()
    paris, lyon = found.sites["paris"], found.sites["lyon"]
    assert paris.payload_bytes == 5 * 50 + 400
    assert (paris.payload_per_round, paris.wire_per_round) == (50.0, pytest.approx(100 * 6.0 / 3))
    assert (lyon.wire_sent_bytes, lyon.wire_received_bytes) == (200 * 12, 200 * 12)
    assert found.control_bytes == 12 * 10 + 12 * 30
    assert found.control_per_round == pytest.approx(10 * 6.0 / 3 / 2)
    assert found.exchange_wire_bytes == 12 * (100 + 200) - 12 * 10
    assert found.payload_bytes == 1300
    assert found.overhead == pytest.approx(3480 / 1300 - 1)


def test_a_site_by_itself_sends_to_the_coordinator_alone() -> None:
    """Whatever the coordinators of other runs on the same host hear meanwhile."""
    own = [r for r in records(5) if r.get("site", "paris") == "paris"]
    samples = [(100.0 + t, counted(100 * t, 200 * t, 500 * t)) for t in range(13)]
    recording = Recording(own, samples, {}, Path("x"))
    found = result_of("run", "none", ["paris"], HUB, recording, warm_up=2)
    assert found.control_bytes == 2 * 100 * 12
    assert found.exchange_wire_bytes == 0
    assert found.control_per_round == pytest.approx(found.sites["paris"].wire_per_round)


def test_counters_between_two_samples_are_taken_as_even() -> None:
    samples = [(10.0, counted(0, 0, 0)), (20.0, counted(100, 0, 0)), (30.0, counted(500, 0, 0))]
    window = result().window.__class__(0, 0, begin=15.0, end=22.5)
    assert between(samples, "paris", "sent_bytes", window) == pytest.approx(200 - 50)
    before = window.__class__(0, 0, begin=5.0, end=40.0)
    assert between(samples, "paris", "sent_bytes", before) == pytest.approx(500)


def test_short_runs_have_fewer_rounds_to_warm_up_in() -> None:
    rounds = rounds_by_site(records(2), SITES)
    assert (window_of(rounds, 2).first, window_of(rounds, 0).first) == (1, 1)
    with pytest.raises(LabError, match="only one round"):
        window_of(rounds_by_site(records(1), SITES), 2)


def test_a_last_round_that_is_cut_is_left_out() -> None:
    """In it nothing hides: exchanges last as long as ever, and there are few steps beside them."""
    found = records(5)
    for record in found:
        if record["kind"] == "round" and record["round"] == 4:
            record["step"] = 44
    rounds = rounds_by_site(found, SITES)
    window = window_of(rounds, 2)
    assert (window.first, window.last, window.end) == (2, 3, window_of(rounds, 0).end)
    # It is all that there is to be measured.
    assert (window_of(rounds, 4).first, window_of(rounds, 4).last) == (4, 4)
    # A site that takes fewer steps than the fastest carries what is left of one.
    assert window_of(rounds_by_site(records(5), SITES), 2).last == 4


def test_a_run_that_a_site_left_is_not_measured() -> None:
    some = [r for r in records(4) if (r.get("site"), r.get("round")) != ("lyon", 2)]
    with pytest.raises(LabError, match="lyon: took part in 3 of 4 rounds"):
        rounds_by_site(some, SITES)
    with pytest.raises(LabError, match="paris: took part in 0 of 0 rounds"):
        rounds_by_site([], SITES)
