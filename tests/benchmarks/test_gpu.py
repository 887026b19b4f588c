"""The acceptance run: what is run, what is written, what is killed, and its table."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import link, machine, outer, product, runs, sizes, staged, tables, wheels
from benchmarks.gpu.parts import PARTS, Aim, Part, part_of, selected
from benchmarks.gpu.results import Results, is_done, summary, table
from benchmarks.gpu.runner import Setting, order, run_all

import dilocox
from dilocox.training import builder
from dilocox.training.launch import rank

MODEL = {"model": {"architecture": {"model_type": "qwen3"}}, "sites": {"a": {}}}
HERE = "tests.support.gpu_parts"
LIMIT, KILLED = 4.0, "killed after 12 s"
"""Limit of parts that hang, and what their row says: a processor has three times as long. A process
that imports torch needs 4 s of a core before its first row."""
QUICK = Part("quick", f"{HERE}:quick", ("passes", "figures", "raises"), 1, 60, "rows",
             aims=(("figures", Aim("speed", ">=", 3.0)),))  # fmt: skip
CRASH = Part("crash", f"{HERE}:crash", ("never",), 1, 60, "no row")


def setting(folder: Path, seconds: float = 60.0, **more: Any) -> Setting:
    return Setting("tiny", folder, time.monotonic() + seconds, **more)


def row(name: str, verdict: str, **figures: float) -> dict[str, Any]:
    return {"name": name, "verdict": verdict, "message": "", "figures": figures, "seconds": 1.0}


# --- the list ----------------------------------------------------------------------------------


def test_every_check_of_the_list_has_rows_and_every_name_is_one() -> None:
    assert {number for part in PARTS for number in part.checks} == set(range(14))
    names = [row for part in PARTS for row in part.rows]
    assert len(names) == len(set(names))
    for part in PARTS:
        # A name that is both means the same.
        assert part.name not in names or part.rows == (part.name,)
        assert {name for name, _ in part.aims} <= set(part.rows)
        assert part.seconds < part.limit


def test_a_run_from_end_to_end_comes_first_and_two_machines_hold_all_parts() -> None:
    assert [part.name for part in PARTS[:3]] == ["machine", "two", "audit"]
    seconds = [part.seconds for part in PARTS]
    # Twice: a call of 9 minutes, and what is left of 15 after the start of the machine.
    for left in (9 * 60 - 10, 255) * 2:
        while seconds and left >= seconds[0]:
            left -= seconds.pop(0)
    assert not seconds


def test_aims_are_those_that_are_asked_for() -> None:
    found = {f"{row}: {aim}" for part in PARTS for row, aim in part.aims}
    assert found == {
        "speed 0.6B: share_of_compiled_loop >= 0.97",
        "speed 0.6B: mfu >= 0.4",
        "speed 1.3B: share_of_compiled_loop >= 0.97",
        "speed 1.3B: mfu >= 0.4",
        "determinism: times_not_deterministic < 1.6",
        "link, two steps: share_of_no_network >= 0.99",
        "link, two steps: steps_per_round <= 2",
        "link, allreduce: two_steps_over_allreduce > 357",
        "boundary and landing: share_of_round < 0.01",
    }


def test_only_takes_parts_and_rows() -> None:
    chosen = selected(["speed", "codec int4"])
    assert [(part.name, rows) for part, rows in chosen] == [
        ("speed", ["plain loop", "speed 0.6B", "determinism"]),
        ("codecs", ["codec int4"]),
    ]
    with pytest.raises(ValueError, match="--only codex: no part or row has this name"):
        selected(["codex"])


def test_list_and_wheels_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "link, two steps  (aim: share_of_no_network >= 0.99; steps_per_round <= 2)" in listed
    assert command.main(["--wheels-line"]) == 0
    line = capsys.readouterr().out
    pinned = wheels.pinned()
    for name in wheels.NAMES:
        assert f"{name}=={pinned[name.replace('_', '-')]}" in line
    assert "--python-version 3.12" in line


def test_a_folder_with_no_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no wheel is there; --wheels-line prints"):
        wheels.install(tmp_path, tmp_path / "site")


# --- the processes -----------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_are_written_at_once_and_a_part_that_hangs_is_killed(tmp_path: Path) -> None:
    hang = Part("hang", f"{HERE}:hang", ("before", "after"), 1, LIMIT, "hangs")
    file = tmp_path / "rows.json"
    results = Results(file, "python -m benchmarks.gpu", "abc")
    seen: list[tuple[str, bool]] = []

    def show(row: dict[str, Any]) -> None:
        written = json.loads(file.read_text(encoding="utf-8"))["rows"]
        seen.append((row["name"], row["name"] in [each["name"] for each in written]))

    began = time.monotonic()
    jobs = [(part, list(part.rows)) for part in (hang, CRASH, QUICK)]
    run_all(jobs, results, setting(tmp_path, show=show))
    assert time.monotonic() - began < 40
    names = ("before", "after", "never", "passes", "figures", "raises")
    assert seen == [(name, True) for name in names]
    verdicts = {name: each["verdict"] for name, each in results.rows.items()}
    assert verdicts == {
        "before": "PASS", "after": "FAIL", "never": "FAIL",
        "passes": "PASS", "figures": "INFO", "raises": "FAIL",
    }  # fmt: skip
    assert results.rows["after"]["message"] == KILLED
    assert results.rows["never"]["message"] == "exit code 1: it has crashed"
    assert results.rows["raises"]["message"] == "ValueError: a wrong value"
    assert {each["commit"] for each in results.rows.values()} == {"abc"}


@pytest.mark.slow
def test_a_crash_and_a_hang_cost_one_row_and_leave_their_logs(tmp_path: Path) -> None:
    names = ("first", "second", "third", "fourth")
    breaks = Part("breaks", f"{HERE}:breaks", names, 1, 60, "crashes")
    stuck = Part("stuck", f"{HERE}:stuck", ("endless", "later"), 1, LIMIT, "hangs")
    results = Results(None, "", None)
    asked = setting(tmp_path / "work", logs=tmp_path / "rows.log")
    jobs = [(breaks, list(names)), (stuck, list(stuck.rows))]
    run_all(jobs, results, asked)
    assert {name: each["verdict"] for name, each in results.rows.items()} == {
        "first": "PASS", "second": "FAIL", "third": "FAIL", "fourth": "PASS",
        "endless": "FAIL", "later": "LEFT OUT",
    }  # fmt: skip
    assert results.rows["second"]["message"] == "exit code 7: it printed nothing"
    assert results.rows["endless"]["message"] == KILLED
    assert results.rows["later"]["message"] == f"not begun: endless was {KILLED}"
    written = (tmp_path / "rows.log").read_text(encoding="utf-8")
    assert "===== breaks: log.txt" in written
    assert "illegal memory access" in written
    # Where a process hung that was killed.
    assert "in stuck" in written
    # The next call begins with the row that was not begun.
    fresh = [(stuck, ["later"]), (breaks, ["second", "third"]), (stuck, ["endless"])]
    assert order(jobs, results, again=False) == fresh


def test_a_call_with_no_time_left_leaves_parts_out_and_keeps_earlier_rows(tmp_path: Path) -> None:
    results = Results(None, "", None)
    results.add(QUICK, row("passes", "FAIL"))
    shown: list[tuple[str, str]] = []

    def show(row: dict[str, Any]) -> None:
        assert table([row])
        shown.append((row["name"], row["verdict"]))

    run_all([(QUICK, list(QUICK.rows))], results, setting(tmp_path, seconds=1.0, show=show))
    # What is shown is what this call did.
    assert shown == [(name, "LEFT OUT") for name in QUICK.rows]
    assert results.rows["passes"]["verdict"] == "FAIL"
    assert results.rows["figures"]["verdict"] == "LEFT OUT"
    assert results.rows["figures"]["message"] == "no time left in this call"


def test_a_later_call_runs_what_is_missing_then_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    first = Results(file, "", None)
    first.set_head({"gpu": None, "torch": "2.11"})
    first.add(QUICK, row("passes", "PASS"))
    first.add(QUICK, row("figures", "INFO"))
    first.add(QUICK, row("raises", "FAIL", speed=1.0))
    results = Results(file, "", None)
    jobs = [(QUICK, list(QUICK.rows)), (CRASH, ["never"])]
    expected = [(QUICK, ["figures"]), (CRASH, ["never"]), (QUICK, ["raises"])]
    assert order(jobs, results, again=False) == expected
    assert order(jobs, results, again=True) == jobs
    results.add(QUICK, row("figures", "INFO", speed=1.0))
    assert [is_done(results.rows[name]) for name in QUICK.rows] == [True, True, False]
    with pytest.raises(SystemExit, match=r"has rows with torch 2\.11, here it is 2\.13"):
        Results(file, "", None).set_head({"gpu": None, "torch": "2.13"})
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"benchmark": "wan", "rows": []}))
    with pytest.raises(SystemExit, match="not a result of this benchmark"):
        Results(other, "", None)


@pytest.mark.parametrize(
    "rows",
    [["codec int4"], pytest.param(["codec int4", "outer step"], marks=pytest.mark.slow)],
    ids=len,
)
def test_the_command_measures_and_goes_on(
    rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real script, with its cheapest rows."""
    words = ["--scale", "tiny", "--json", str(tmp_path / "gpu.json"), "--minutes", "3"]
    words += ["--only", *rows]
    assert command.main(words) == 0
    content = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert content["command"] == (
        "python -m benchmarks.gpu --scale tiny --json gpu.json --minutes 3 --only "
        + " ".join(f"'{row}'" for row in rows)
    )
    assert content["machine"]["scale"] == "tiny"
    assert {"gpu", "driver", "torch", "cuda", "nccl", "transformers"} <= set(content["machine"])
    verdicts = {each["name"]: each["verdict"] for each in content["rows"]}
    assert verdicts == dict.fromkeys(["machine", *rows], "PASS")
    figures = content["rows"][1]["figures"]
    assert figures["encode_gb_s"] > 0
    capsys.readouterr()
    # All rows are done: a second call starts no part but that of the machine.
    jobs = selected(rows)
    assert order(jobs, Results(tmp_path / "gpu.json", "", None), again=False) == []


# --- the tables --------------------------------------------------------------------------------


def on_gpu(path: Path | None = None) -> Results:
    results = Results(path, "", "abc")
    results.set_head(
        {
            "gpu": "NVIDIA H100", "driver": "580", "torch": "2.11.0", "cuda": "13.0",
            "nccl": "2.28.9", "transformers": "5.17.0",
        }
    )  # fmt: skip
    return results


def test_aims_are_data_on_a_gpu_and_not_elsewhere() -> None:
    results = on_gpu()
    missed = results.add(QUICK, row("figures", "INFO", speed=2.5))
    assert missed["aims"] == [{"figure": "speed", "aim": ">= 3", "met": False}]
    assert "speed 2.5, aim >= 3: MISSED" in table([missed])
    met = results.add(QUICK, row("figures", "INFO", speed=3.0))
    assert summary([missed, met]) == "2 INFO; 1 of 2 aims met"
    assert summary([{**met, "aims": []}]) == "1 INFO; no aims judged"
    lacking = results.add(QUICK, row("figures", "INFO"))
    assert lacking["aims"][0]["met"] is False
    assert Results(None, "", None).add(QUICK, row("figures", "INFO", speed=2.5))["aims"] == []


def test_the_table_of_the_documents(tmp_path: Path) -> None:
    page = "before\n<!-- gpu: begin -->\nold\n<!-- gpu: end -->\nafter\n"
    nothing = tables.filled(page, [])
    assert "No run on a GPU exists yet" in nothing
    assert tables.filled(nothing, []) == nothing
    results = on_gpu(tmp_path / "gpu-h100.json")
    results.add(
        part_of("speed 0.6B"), row("speed 0.6B", "INFO", mfu=0.41, share_of_compiled_loop=0.95)
    )
    failed = {**row("host syncs", "FAIL", syncs=4), "message": "masking.py:7 x4"}
    results.add(part_of("host syncs"), failed)
    left = {**row("copies", "LEFT OUT"), "message": "no time left\nin this call"}
    results.add(part_of("copies"), left)
    made = tables.filled(page, [json.loads((tmp_path / "gpu-h100.json").read_text())])
    assert "NVIDIA H100, driver 580, PyTorch 2.11.0, CUDA 13.0, NCCL 2.28.9" in made
    assert "commit abc. 1 FAIL, 1 INFO, 1 LEFT OUT; 1 of 2 aims met.\n" in made
    lines = [line for line in made.splitlines() if line.startswith("| ")]
    assert lines[1:] == [
        "| speed 0.6B | INFO | mfu 0.41; share of compiled loop 0.95 | share of compiled loop "
        "0.95, aim >= 0.97: MISSED; mfu 0.41, aim >= 0.4: met |",
        "| host syncs | FAIL | masking.py:7 x4 |  |",
        "| copies | LEFT OUT | no time left in this call |  |",
    ]
    assert made.startswith("before\n")
    assert made.endswith("after\n")


# --- what only a GPU would show ----------------------------------------------------------------


def test_run_files_at_the_sizes_of_a_gpu_have_a_vocabulary_that_fits(tmp_path: Path) -> None:
    """On a GPU two parts train the smallest shape."""
    shapes = (sizes.SITE["tiny"], *(each["gpu"] for each in (sizes.SITE, sizes.MIXED, sizes.LINK)))
    for at, shape in enumerate(shapes):
        path = sizes.run_file(tmp_path, f"r{at}", shape, tmp_path, "gpu")
        config = dilocox.load_run(path)
        assert config.data.vocabulary_size <= shape.vocabulary


def test_all_ranks_of_a_site_take_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module of a rank's start that asks for the device is told so."""
    asking = [module for module in (builder, rank) if hasattr(module, "resolve_device")]
    monkeypatch.setattr(staged, "register", lambda _device: dist.init_process_group)
    site = dilocox.resolve_run({**MODEL, "site": {"shards": 2}}).site
    with product.ranks_share_gpu(True):
        assert {str(module.resolve_device(site, 1)) for module in asking} == {"cuda:0"}
    source = Path(dilocox.__file__).parent
    users = {
        file.stem
        for file in (source / "training").rglob("*.py")
        if re.search(r"^    resolve_device,$|import (.*, )?resolve_device$", file.read_text(), re.M)
    }
    assert users == {module.__name__.rpartition(".")[2] for module in asking}


def test_memory_is_touched_only_where_little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(machine.subprocess, "run", lambda words, **_: asked.append(words))
    monkeypatch.setattr(machine, "_memory", lambda name: 100 << 30)
    machine._touch()
    assert asked == []
    monkeypatch.setattr(machine, "_memory", {"MemAvailable": 1, "MemTotal": 1 << 21}.get)
    machine._touch()
    monkeypatch.undo()
    assert asked[0][-1] == str(1 << 20)
    assert subprocess.run(asked[0], check=True, timeout=60).returncode == 0


# --- figures of runs ---------------------------------------------------------------------------


def rounds_in(folder: Path, steps: tuple[int, ...], seconds: float) -> Path:
    """A run's metrics: rounds of so many steps of 10 tokens, of equal length."""
    lines, step = [], 0
    for number, count in enumerate(steps):
        step += count
        lines.append(
            {"kind": "round", "round": number, "site": "north", "time": seconds * (number + 1),
             "steps": count, "step": step, "tokens": 10 * count, "tokens_per_second": 1.0}
        )  # fmt: skip
    lines.append({"kind": "round", "round": 0, "time": 0.0})  # of the run, not of a site
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(f'{text}{{"kind": "rou', encoding="utf-8")
    return folder


def test_speed_leaves_out_the_warm_up_and_the_cut_last_round(tmp_path: Path) -> None:
    folder = rounds_in(tmp_path, (9, 2, 2, 4, 1), seconds=2.0)
    assert link.first_after(folder, 10) == 2
    assert link.speed(folder, "north", 2) == pytest.approx(10 * (2 + 4) / 4.0)
    assert link.speed(folder, "north", 4) == pytest.approx(10 * 1 / 2.0)


def test_a_link_has_the_ratio_that_is_asked_for() -> None:
    """Two sites send each other one gradient a step: 4 bytes a parameter each way."""
    assert link.gradient_bits(10**6) == 32e6
    assert link.rate_text(111.2345e6) == "111.234mbit"
    assert link.rate_text(560_600.0) == "560.600kbit"


def test_spans_of_the_first_round_and_of_other_kinds_do_not_count(tmp_path: Path) -> None:
    def span(name: str, key: str, microseconds: int) -> dict[str, Any]:
        return {"ph": "X", "name": name, "dur": microseconds, "args": {"key": key}}

    events = [
        span("boundary", "outer/0/0/0", 10**6), span("boundary", "outer/1/0/0", 2 * 10**6),
        span("landing", "outer/1/0/0", 3 * 10**6), span("landing", "flush/1/0/0", 10**6),
        {"ph": "M", "name": "boundary"},
        {"ph": "X", "name": "wait for digest", "dur": 10**6, "args": {"values": 1}},
    ]  # fmt: skip
    for content in ({"traceEvents": events}, events):
        (tmp_path / "trace.json").write_text(json.dumps(content), encoding="utf-8")
        found = outer.seconds_of_spans(tmp_path / "trace.json")
        assert found == {"boundary": 2.0, "landing": 3.0}
        assert outer.seconds_of_spans(tmp_path / "trace.json", [outer.HASHED]) == {
            "wait for digest": 1.0
        }


def test_the_gpu_counts_spans_as_the_host_does(tmp_path: Path) -> None:
    lines = [
        {"name": "boundary", "key": "outer/0/0/0", "ms": 5.0},
        {"name": "boundary", "key": "outer/1/0/0", "ms": 2.0},
        {"name": "landing", "key": "outer/2/0/0", "ms": 3.0},
        {"name": "landing", "key": "flush/2/0/0", "ms": 4.0},
    ]
    clock = tmp_path / "spans.jsonl"
    clock.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert outer.seconds_by_gpu(clock) == {"boundary": 0.002, "landing": 0.003}


def test_peaks_are_found_by_name() -> None:
    assert sizes.peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert sizes.peak_of("NVIDIA H200") == 989e12
    assert sizes.peak_of("Some GPU") is None


def test_a_round_that_one_site_was_missing_from_is_told(tmp_path: Path) -> None:
    """Anchors of two runs differ then, which says nothing about how one of them was resumed."""
    metrics = tmp_path / "metrics.jsonl"
    both = {"kind": "round", "round": 0, "site": "north", "contributors": 2}
    metrics.write_text(f'{json.dumps(both)}\n{{"kind": "message", "text": "x"}}\n')
    assert not runs.alone(tmp_path)
    with metrics.open("a") as file:
        file.write(json.dumps({**both, "round": 1, "contributors": 1}) + "\n")
    assert runs.alone(tmp_path)
