"""Timelines: what is recorded, the Chrome trace made of it, and nothing without a file."""

from __future__ import annotations

import json
import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dilocox.utils import chrome_trace, tracing

pytestmark = pytest.mark.waits


def merged(folder: Path) -> dict[str, Any]:
    path = chrome_trace.merge_run(folder)
    assert path == folder / "trace.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def rows(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


def test_without_a_recording_nothing_is_made(tmp_path: Path) -> None:
    with tracing.recording(None):
        with tracing.span("work", size=1) as at:
            at.note(more=2)
        tracing.mark("round 0")
        assert tracing.span("a") is tracing.span("b"), "one object stands for all spans"
    assert list(tmp_path.iterdir()) == []
    assert chrome_trace.merge_run(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_spans_and_marks_become_a_chrome_trace(tmp_path: Path) -> None:
    with tracing.recording(chrome_trace.part_path(tmp_path, "paris", 0, 1)):
        tracing.mark("round 3", codec="int4")
        with tracing.span("outer", size=7) as outer:
            with tracing.span("inner"):
                sum(range(200_000))
            outer.note(bytes=9)
    with tracing.span("too late"):
        pass
    trace = merged(tmp_path)
    inner, outer_event = spans(trace)
    (mark,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert (inner["name"], outer_event["name"]) == ("inner", "outer")
    assert outer_event["args"] == {"size": 7, "bytes": 9}
    assert outer_event["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer_event["ts"] + outer_event["dur"]
    # It computed all the time, by the thread's own clock too.
    assert 0 < inner["tdur"] <= outer_event["tdur"]
    assert (mark["name"], mark["ts"], mark["s"]) == ("round 3", 0.0, "p")
    assert mark["args"]["codec"] == "int4"
    assert mark["args"]["process_cpu_us"] > 0
    assert rows(trace) == {(1, 0): "training"}
    assert trace["otherData"]["ranks"] == ["paris stage0 shard1"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_a_span_that_ends_with_an_error_is_recorded(tmp_path: Path) -> None:
    recording = tracing.recording(chrome_trace.part_path(tmp_path, "a", 0, 0))
    with recording, pytest.raises(ValueError, match="broken"), tracing.span("work"):
        raise ValueError("broken")
    assert [event["name"] for event in spans(merged(tmp_path))] == ["work"]


def test_threads_share_a_row_only_one_after_the_other(tmp_path: Path) -> None:
    """Two at once, then a third one alone: two rows."""
    both = threading.Barrier(2)

    def transfer(meet: bool) -> None:
        with tracing.span("send"):
            if meet:
                both.wait(10.0)

    with tracing.recording(chrome_trace.part_path(tmp_path, "a", 0, 0)):
        pair = [threading.Thread(target=transfer, args=(True,), name="send to b") for _ in range(2)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        last = threading.Thread(target=transfer, args=(False,), name="send to b")
        last.start()
        last.join()
        with tracing.span("step"):
            pass
    trace = merged(tmp_path)
    assert sorted(rows(trace).values()) == ["send to b", "send to b (2)", "training"]
    assert rows(trace)[1, 0] == "training", "the main thread comes first"
    for row, title in rows(trace).items():
        own = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in spans(trace) if (e["pid"], e["tid"]) == row
        )
        assert all(one[1] <= other[0] for one, other in pairwise(own)), title
    assert len(spans(trace)) == 4


def test_ranks_are_processes_on_one_clock(tmp_path: Path) -> None:
    for site, stage in (("paris", 0), ("lyon", 1), ("lyon", 0)):
        part = chrome_trace.part_path(tmp_path, site, stage, 0)
        with tracing.recording(part), tracing.span(f"{site}{stage}"):
            pass
    lyon = chrome_trace.merge_site(tmp_path, "lyon")
    assert lyon == tmp_path / "trace-lyon.json"
    found = json.loads(lyon.read_text(encoding="utf-8"))
    names = {event["name"]: event for event in spans(found)}
    assert names.keys() == {"lyon0", "lyon1"}
    assert names["lyon1"]["ts"] < names["lyon0"]["ts"], "in the order in which it was"
    assert names["lyon1"]["pid"] != names["lyon0"]["pid"]
    rest = chrome_trace.merge_rank(tmp_path, "paris", 0, 0)
    assert rest == tmp_path / "trace-paris-stage0-shard0.json"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "trace-lyon.json",
        "trace-paris-stage0-shard0.json",
    ]


def test_ranks_that_end_together_do_not_trip_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the folder empty, and one of them has removed it."""
    with tracing.recording(chrome_trace.part_path(tmp_path, "paris", 0, 0)), tracing.span("x"):
        pass

    def gone(folder: Path) -> None:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(Path, "rmdir", gone)
    assert chrome_trace.merge_rank(tmp_path, "paris", 0, 0) is not None


def test_what_a_killed_rank_has_written_is_kept(tmp_path: Path) -> None:
    part = chrome_trace.part_path(tmp_path, "a", 0, 0)
    with tracing.recording(part):
        for _ in range(tracing.KEPT_EVENTS):
            with tracing.span("step"):
                pass
        written = part.read_text(encoding="utf-8")
    part.write_text(written[:-20], encoding="utf-8")
    assert len(spans(merged(tmp_path))) == tracing.KEPT_EVENTS - 1


def test_a_full_disk_ends_the_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with caplog.at_level(logging.WARNING), tracing.recording(full), tracing.span("work"):
        pass
    assert caplog.text.count("recording of the timeline stopped (") == 1
