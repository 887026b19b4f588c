"""Shares measured side by side: from records to tokens/s over the same seconds."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common import course_of, tokens_at
from benchmarks.wan import beside as wan_beside
from benchmarks.wan import run as wan_run
from benchmarks.wan.beside import VOCABULARY, Load, report, speeds

from dilocox.models import count_parameters, load_model_config
from dilocox.tools.testbed import LabError

ROOT = Path(__file__).parents[2]


def rounds(start: float, length: float, tokens: float, count: int) -> list[dict[str, Any]]:
    return [{"time": start + length * (n + 1), "tokens": tokens} for n in range(count)]


def test_tokens_are_trained_on_evenly_within_a_round() -> None:
    course = course_of(rounds(100.0, 2.0, 10.0, 3))
    assert course == [(102.0, 10.0), (104.0, 20.0), (106.0, 30.0)]
    assert tokens_at(course, 104.0) == 20.0
    assert tokens_at(course, 105.5) == 27.5
    with pytest.raises(ValueError, match=r"no round of 102\.0 to 106\.0 has 101\.0"):
        tokens_at(course, 101.0)


def test_both_are_measured_over_the_same_seconds() -> None:
    """Halfway through, everything gets twice as slow: each of the others by itself, and ours."""
    ours = course_of(rounds(0.0, 1.0, 9.0, 50) + rounds(50.0, 2.0, 9.0, 25))
    late = course_of(rounds(3.0, 8.0, 80.0, 6) + rounds(51.0, 16.0, 80.0, 3))
    early = course_of([*rounds(1.0, 8.0, 80.0, 3), {"time": 33.0, "tokens": 80.0}])
    own, other = speeds([ours, ours], [late, late], begin=10.0)
    # From 11 s to 99 s the others do 40 s at 10 tokens/s and 48 s at 5; ours 39 at 9, 49 at 4.5.
    assert other == pytest.approx(2 * (40 * 10 + 48 * 5) / 88)
    assert own == pytest.approx(2 * (39 * 9 + 49 * 4.5) / 88)
    own, other = speeds([ours, ours], [early, early], begin=0.0)
    assert (own, other) == (pytest.approx(18.0), pytest.approx(20.0))
    with pytest.raises(LabError, match="no whole round without exchange"):
        speeds([ours], [early], begin=30.0)


def test_the_report_says_median_and_interval() -> None:
    row = {
        "method": "dilocox", "hosts": "paris lyon",
        "tokens_per_second": 97.0, "no_network_tokens_per_second": 100.0,
        "wait_share": 0.01, "work_share": 0.02, "inner_steps": 30.0, "plan": "as told",
        "link_bits_per_second": 998_000, "ratio": 402.0, "round_trip_ms": 0.3,
    }  # fmt: skip
    told = report([{**row, "block": n, "share": share} for n, share in enumerate((0.96, 0.97, 1))])
    assert "97.0% (96.0% to 100.0%) in 3 blocks, on 998 kbit/s" in told
    assert "402 to 402 times as long as a step; round trips of 0.3 to 0.3 ms" in told
    assert "allreduce" not in told


def test_the_report_says_how_much_faster_than_allreduce_on_the_same_link() -> None:
    blocks = [
        {
            "block": n, "method": "dilocox", "hosts": "paris lyon", "tokens_per_second": 97.0 + n,
            "no_network_tokens_per_second": 100.0, "wait_share": 0.01, "work_share": 0.02,
            "inner_steps": 30.0, "plan": "as told", "link_bits_per_second": 998_000,
            "ratio": 402.0, "round_trip_ms": 0.3, "share": 0.97 + n / 100,
        }
        for n in range(3)
    ]  # fmt: skip
    slow = {"block": None, "method": "allreduce", "tokens_per_second": 0.25, "ratio": 402.0}
    told = report([*blocks, slow])
    assert "98.0% (97.0% to 99.0%) in 3 blocks" in told
    assert "0.2 tokens/s, 0.25% of the speed without a network" in told
    assert "392 times as fast (388 to 396)" in told


def test_synchronous_steps_are_lacking_where_they_are_asked_for_and_not_there() -> None:
    ours, theirs = {"method": "dilocox"}, {"method": "allreduce"}
    assert wan_beside.lacks_synchronous([ours], 2)
    assert not wan_beside.lacks_synchronous([ours], 0)
    assert not wan_beside.lacks_synchronous([ours, theirs], 2)


def test_every_host_trains_together_as_often_as_alone() -> None:
    together = [host for pair in wan_beside.PAIRS for host in pair]
    assert {together.count(host) for host in range(4)} == {len(wan_beside.PAIRS) // 2}


def test_steps_are_fewer_as_they_are_longer(tmp_path: Path) -> None:
    assert Load().steps(1600) == 1600
    load = Load(batch=32, width=256)
    assert load.steps(1600) == 200
    sizes = []
    for each in (Load(), load):
        config = wan_run.configuration(tmp_path, 2, each.settings, 1)
        assert config.site.batch_size == each.batch
        sizes.append(count_parameters(load_model_config(config.model, VOCABULARY)))
    embedding = VOCABULARY * 128
    # Four times the matrices; some hundred of its values are norms.
    assert sizes[1] - 2 * embedding == pytest.approx(4 * (sizes[0] - embedding), rel=0.01)


def test_documented_commands_measure_and_do_not_stop_at_another_file() -> None:
    """Blocks of other settings than those of the file that would be gone on with are refused."""
    told = []
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
    for page in (*pages, *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        told += re.findall(r"`(python -m benchmarks\.wan\.beside[^`]*)`", text)
    assert len(told) >= 6
    assert [command for command in told if "--json NEW.json" not in command] == []


def test_what_is_measured_is_reported_where_no_lab_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lab was made for nothing, and the report of committed results needed root."""
    results = tmp_path / "wide.json"
    before = (ROOT / "benchmarks" / "results" / "wan-beside-wide-cpu.json").read_bytes()
    results.write_bytes(before)
    told = ["--batch", "32", "--width", "256", "--allreduce", "2", "--json", str(results)]
    monkeypatch.setattr(wan_beside, "unsupported_reason", lambda: "network namespaces need root")
    monkeypatch.setattr(wan_beside, "Lab", lambda *_: pytest.fail("a lab is made"))
    monkeypatch.setattr(wan_beside.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(sys, "argv", ["beside.py", *told])
    assert wan_beside.main() == 0
    assert "98.9% (98.5% to 99.1%) in 8 blocks" in capsys.readouterr().out
    assert results.read_bytes() == before
    monkeypatch.setattr(sys, "argv", ["beside.py", *told, "--blocks", "9"])
    assert wan_beside.main() == 3


@pytest.mark.parametrize("told", [["--blocks", "0"], ["--batch", "0"], ["--allreduce", "-1"]])
def test_numbers_that_measure_nothing_are_refused(
    told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No blocks were the default number of blocks, and others ended in a traceback."""
    monkeypatch.setattr(wan_beside.common, "machine", lambda: pytest.fail("it begins"))
    monkeypatch.setattr(sys, "argv", ["beside.py", *told])
    with pytest.raises(SystemExit) as ended:
        wan_beside.main()
    assert ended.value.code == 2
    assert f"argument {told[0]}: {told[1]}: give a whole number" in capsys.readouterr().err
