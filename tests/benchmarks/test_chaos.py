"""The schedule of faults and what is made of a run's records, against numbers worked by hand."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from benchmarks.chaos import beside
from benchmarks.chaos import command as chaos
from benchmarks.chaos import rows as chaos_rows
from benchmarks.chaos import run as chaos_run
from benchmarks.chaos.rows import Blow

from tests.support.lab_needs import needs_lab
from tests.support.mounting import need_mounts


def test_every_kind_comes_once_before_any_comes_again() -> None:
    found = chaos.schedule(7, 2 * len(chaos.KINDS) + 1)
    first, second = found[: len(chaos.KINDS)], found[len(chaos.KINDS) : -1]
    assert {kind for kind, _ in first} == {kind for kind, _ in second} == set(chaos.KINDS)
    assert found == chaos.schedule(7, len(found))
    assert found != chaos.schedule(8, len(found))
    assert dict(found)["coordinator-kill"] == chaos.HUB
    assert dict(found)["disk-full"] == chaos.SMALL_DISK


def report(site: str | None, number: int, time: float) -> dict[str, Any]:
    return {"kind": "round", "site": site, "round": number, "time": time}


def test_a_round_counts_when_the_first_survivor_reports_it() -> None:
    records = [
        report("lyon", 0, 1.0), report("paris", 0, 1.2), report(None, 0, 1.2),
        report("lyon", 1, 1.9), report("paris", 1, 2.5),
        report("oslo", 2, 3.4), report("paris", 2, 3.5),
        {"kind": "message", "time": 3.6},
    ]  # fmt: skip
    assert chaos_rows.round_times(records, "lyon") == [1.2, 2.5, 3.4]
    assert chaos_rows.round_times(records, chaos.HUB) == [1.0, 1.9, 3.4]


def test_a_stall_is_the_longest_gap_near_the_fault_less_the_usual_one() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 9.0, 10.0, 11.0, 31.0, 32.0]
    assert chaos_rows.stall(Blow("rank-kill", "lyon", 3.5, 10.5), times) == pytest.approx(5.0)
    assert chaos_rows.stall(Blow("rank-kill", "lyon", 0.2, 2.5), times) == 0.0


def test_rows_have_medians_and_the_worst() -> None:
    records = [report("paris", number, float(number)) for number in range(4)]
    records += [report("paris", 4 + number, 8.0 + number) for number in range(8)]
    blows = [Blow("rank-kill", "lyon", 3.1, 9.1), Blow("rank-kill", "lyon", 12.1, 14.1)]
    faults = chaos_rows.fault_rows(blows, records)
    assert faults[0] == {
        "fault": "rank-kill", "site": "lyon", "stall_seconds": 4.0, "recovery_seconds": 6.0
    }  # fmt: skip
    row, _ = chaos_rows.rows_of(list(chaos.KINDS), faults, [])
    assert row == {
        "fault": "rank-kill", "count": 2, "stall_seconds": 2.0, "stall_worst": 4.0,
        "recovery_seconds": 4.0, "recovery_worst": 6.0,
    }  # fmt: skip


def test_the_run_as_a_whole() -> None:
    summary = {
        "phase": "finished", "rounds": 90, "sequences_doubled": 0, "sequences_missing": 0,
        "val_loss_last": 2.02,
    }  # fmt: skip
    ledger = [
        {"site": "lyon", "round": 4, "state": "returned"},
        {"site": "lyon", "round": 4, "state": "returned"},
        {"site": "oslo", "round": 4, "state": "returned"},
        {"site": "oslo", "round": 5, "state": "committed"},
    ]
    part = chaos_rows.part_row(summary, ledger, 2.0, [])
    assert part["discarded"] == 2
    assert part["loss_ratio"] == pytest.approx(1.01)
    parts = [
        {"seconds": 90, **part},
        {"seconds": 30, **part, "loss_ratio": 1.03, "tokens_lost": 1},
        {"seconds": 60, **chaos_rows.HUNG},
    ]
    (row,) = chaos_rows.rows_of(list(chaos.KINDS), [], parts)
    assert (row["hangs"], row["diverged"], row["tokens_lost"]) == (1, 0, 1)
    assert (row["rounds"], row["discarded"], row["minutes"]) == (180, 4, 3.0)
    assert (row["loss_ratio"], row["loss_ratio_worst"]) == (1.02, 1.03)


def test_a_site_with_other_weights_counts_though_the_run_goes_on_without_it() -> None:
    """The coordinator declares such a site lost, and it may join again."""
    summary = {
        "phase": "finished", "rounds": 2, "sequences_doubled": 0, "sequences_missing": 0,
        "val_loss_last": 2.0,
    }  # fmt: skip

    def shown(site: str, number: int, digest: str | None) -> dict[str, Any]:
        return {**report(site, number, float(number)), "anchor_digest": digest}

    same = [shown(site, 0, "a") for site in chaos_run.SITES]
    behind = [shown("lyon", 1, "b"), shown("paris", 1, None)]
    assert chaos_rows.part_row(summary, [], 2.0, same + behind)["diverged"] == 0
    odd = [*same, *behind, shown("oslo", 1, "c")]
    assert chaos_rows.part_row(summary, [], 2.0, odd)["diverged"] == 1
    # A site that trains a round again reports it again.
    assert chaos_rows.part_row(summary, [], 2.0, [*odd, shown("oslo", 1, "b")])["diverged"] == 0


def test_parts_that_are_there_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos.common, "machine", dict)
    results = tmp_path / "chaos.json"
    extent = chaos.Extent(seed=5, parts=2, faults=3, rounds=10)
    soak = chaos.Soak(extent, results)
    soak.reference = 2.0
    soak.parts = [{"part": 0, "seed": 5, "seconds": 30, **chaos_rows.HUNG}]
    soak.faults = [
        {"part": 0, "fault": "rogue", "site": "lyon", "stall_seconds": 0.1, "recovery_seconds": 3.0}
    ]
    soak.keep()
    again = chaos.Soak(extent, results)
    assert (again.reference, again.parts, again.faults) == (2.0, soak.parts, soak.faults)
    made: list[int] = []
    monkeypatch.setattr(chaos.Soak, "_part", lambda self, net, root, part, ref: made.append(part))
    monkeypatch.setattr(chaos, "Network", MagicMock())
    monkeypatch.setattr(chaos.common, "run_dilocox", MagicMock())
    again.run(tmp_path)
    assert made == [1]
    with pytest.raises(SystemExit):
        chaos.Soak(chaos.Extent(seed=6, parts=2, faults=3, rounds=10), results)


def test_a_disk_on_which_no_file_can_be_made_is_full_too(tmp_path: Path) -> None:
    said = iter(["", "paris: checkpoint 8 was not written"])
    run = MagicMock(over=False, said=lambda: next(said))
    run.folder.return_value = tmp_path / "full"  # nothing can be made in a folder that is not there
    run.until = lambda ready, what: ready()
    chaos.disk_full(run, chaos.SMALL_DISK, random.Random(0))


def test_one_line_and_code_3_where_networks_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--quick"])
    monkeypatch.setattr(chaos.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(chaos, "unsupported_reason", lambda: "network namespaces need root")
    assert chaos.main() == 3
    said = capsys.readouterr().err.splitlines()
    assert said == ["chaos: cannot be measured here: network namespaces need root"]


def test_a_part_has_the_commit_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of an earlier call are kept, and the head of the file has the commit of the last."""
    monkeypatch.setattr(chaos.common, "machine", dict)
    monkeypatch.setattr(chaos.common, "commit", lambda: "abc")
    monkeypatch.setattr(chaos, "started", MagicMock())
    monkeypatch.setattr(chaos, "torment", MagicMock(side_effect=chaos.HangError("no round")))
    monkeypatch.setattr(chaos_rows, "fault_rows", lambda *_: [])
    soak = chaos.Soak(chaos.Extent(seed=5, parts=1, faults=3, rounds=10), None)
    soak._part(MagicMock(), tmp_path, 0, 2.0)
    (part,) = soak.parts
    assert (part["hangs"], part["commit"]) == (1, "abc")


@pytest.mark.parametrize("word", ["--seed", "--parts", "--faults"])
def test_options_of_the_long_run_are_refused_with_the_short_one(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--beside", word, "2"])
    monkeypatch.setattr(chaos, "unsupported_reason", lambda: "network namespaces need root")
    with pytest.raises(SystemExit) as ended:
        chaos.main()
    assert ended.value.code == 2
    assert f"{word}: has no meaning with --beside" in capsys.readouterr().err


def test_each_run_has_a_small_disk_of_its_own(tmp_path: Path) -> None:
    need_mounts(tmp_path)
    folder = tmp_path / "oslo"
    for _ in range(2):
        with chaos_run.small_disk(folder):
            assert list(folder.iterdir()) == []
            (folder / "filler").write_bytes(b"x")
            with pytest.raises(OSError, match="No space left"):
                (folder / "more").write_bytes(bytes((chaos_run.DISK_MIB + 1) << 20))
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.alone
@needs_lab
def test_a_run_with_standby_and_witness_goes_on(tmp_path: Path) -> None:
    """A coordinator that is killed for good, in namespaces; the witness sees one log."""
    assert beside.main(60, tmp_path / "rows.json") == 0
    content = json.loads((tmp_path / "rows.json").read_text())
    assert [row["fault"] for row in content["rows"]] == [*(kind for kind, _ in beside.KINDS), "run"]
    assert content["rows"][-1]["tokens_doubled"] == content["rows"][-1]["tokens_lost"] == 0
    assert "have cosigned all" in content["settings"]["witness"]
