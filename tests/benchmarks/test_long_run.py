"""`benchmarks/long_run.py` on a run of two rounds."""

from __future__ import annotations

from pathlib import Path

from benchmarks import long_run


def test_a_short_run_is_driven_started_again_and_read(tmp_path: Path) -> None:
    """In one process here; the benchmark measures each in a process of its own."""
    config = long_run.run_config(tmp_path / "run", 2)
    rows = long_run.drive(config, 2)
    assert [row["rounds"] for row in rows] == [1, 2]
    assert rows[-1]["log_mb"] > 0.5
    assert long_run.restarted(config)["rounds"] == 2
    read = long_run.verified(config)
    assert read["statements"] > 2 * 500
    assert (read["log"], read["signatures"]) == ("PASS", "PASS")
