"""`dilocox train --trace`: the timeline of a real run. That others have none holds the harness."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from tests.support.harness import PATIENT, Run, Workshop

pytestmark = pytest.mark.runs

SHORT = ("outer.rounds=2", "checkpoint.every_rounds=0", PATIENT)
WAYS = ("send", "receive")
NANOSECOND = 1e-3
"""In a trace times are microseconds."""


@pytest.fixture(scope="module")
def traced(shared_workshop: Workshop) -> Run:
    run = shared_workshop.start("traced", *SHORT, flags=("--trace",))
    assert run.wait() == 0, run.output()
    return run


@pytest.fixture(scope="module")
def trace(traced: Run) -> dict[str, Any]:
    path = traced.folder / "trace.json"
    assert str(path) in traced.printed()
    assert not (traced.folder / "trace").exists(), "parts are merged and removed"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def spans(trace: dict[str, Any], name: str = "") -> list[dict[str, Any]]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if name in ("", event["name"])]


def exchanged(trace: dict[str, Any], way: str) -> list[dict[str, Any]]:
    """Transfers of exchanges; the others hand an entering site its state."""
    return [e for e in spans(trace, way) if e["args"]["group"].startswith("epoch/")]


def test_it_is_a_chrome_trace(trace: dict[str, Any]) -> None:
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "i"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] != "M":
            assert event["ts"] >= 0.0
    assert all(event["dur"] >= 0.0 for event in spans(trace))
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == [f"{site} stage{n} shard0" for site in ("lyon", "paris") for n in (0, 1)]


def test_spans_of_a_thread_nest(trace: dict[str, Any]) -> None:
    rows = defaultdict(list)
    for event in spans(trace):
        rows[event["pid"], event["tid"]].append(event)
    assert len(rows) >= 4 * 4, "training, exchange, and a transfer each way, of four ranks"
    for row in rows.values():
        open_: list[dict[str, Any]] = []
        for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
            while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"] + NANOSECOND:
                open_.pop()
            if open_:
                end = open_[-1]["ts"] + open_[-1]["dur"]
                assert event["ts"] + event["dur"] <= end + 2 * NANOSECOND, (event, open_[-1])
            open_.append(event)


def test_every_rank_shows_its_rounds_and_what_is_in_them(trace: dict[str, Any]) -> None:
    for process in range(1, 5):
        every = [event for event in spans(trace) if event["pid"] == process]
        entry = [e for way in WAYS for e in spans(trace, way) if e not in exchanged(trace, way)]
        own = [event for event in every if event not in entry]
        count = {name: sum(e["name"] == name for e in own) for name in {e["name"] for e in own}}
        # Two rounds of eight steps; two fragments in each, and once more at the end.
        expected = dict.fromkeys(
            ("boundary", "exchange", "encode", "vote", "send", "receive", "decode and average",
             "wait for landing", "landing", "outer step", "residual"), 6,
        )  # fmt: skip
        steps = dict.fromkeys(
            ("inner step", "forward and backward", "optimizer", "batch", "wait for lease"), 16
        )
        rest = {"account": 2, "report": 2, "checkpoint": 1, "publish": 1, "form group": 1}
        assert {name: count[name] for name in (*expected, *steps, *rest)} == {
            **expected,
            **steps,
            **rest,
        }
        assert count["wait for plan"] == 3
        marks = [e["name"] for e in trace["traceEvents"] if e["ph"] == "i" and e["pid"] == process]
        assert marks == ["round 0", "round 1", "flush"]


def test_the_first_site_alone_evaluates(trace: dict[str, Any]) -> None:
    # Before and after training, by both of its ranks.
    assert sorted(event["pid"] for event in spans(trace, "evaluation")) == [3, 3, 4, 4]


def test_sent_bytes_are_the_payload_bytes_of_the_metrics(
    trace: dict[str, Any], traced: Run
) -> None:
    reported = [
        record["payload_bytes"]
        for site in ("paris", "lyon")
        for kind in ("round", "flush")
        for record in traced.records(kind, site)
    ]
    assert len(reported) == 6
    sent = sum(event["args"]["bytes"] for event in exchanged(trace, "send"))
    assert sent == sum(reported)
    assert sent == sum(event["args"]["payload_bytes"] for event in spans(trace, "exchange"))
    # What one site sends the other receives.
    assert sent == sum(event["args"]["bytes"] for event in exchanged(trace, "receive"))
    both = sum(event["args"]["bytes"] for name in WAYS for event in spans(trace, name))
    travelled = spans(trace, "travel")
    assert len(travelled) == len(spans(trace, "wait for peer"))
    assert sum(event["args"]["bytes"] for event in travelled) == both > 2 * sent
