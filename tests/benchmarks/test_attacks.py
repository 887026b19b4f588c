"""The attacks benchmark: a course of a few steps, and what is made of rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.attacks import command as attacks
from benchmarks.attacks import process
from benchmarks.attacks.lm import Text
from benchmarks.attacks.moves import MOVES
from benchmarks.attacks.sites import ATTACKERS, SITES, Course, Length

MOVE = {move.name: move for move in MOVES}


@pytest.mark.parametrize(
    ("name", "code"),
    [("NaN", "not-finite"), ("wrong shape", "malformed"), ("copy", "duplicate"),
     ("equivocation", "equivocation"), ("replayed signature", "")],
)  # fmt: skip
def test_what_the_checks_find_never_counts(name: str, code: str) -> None:
    course = Course(MOVE[name], "clip", Length(1, 1), 0, Text())
    assert 0 < course.run() < 10
    assert course.tally.codes(ATTACKERS) == code
    out = course.tally.share(ATTACKERS) + course.refused / (course.tally.exchanges * 2)
    assert out == 1.0
    assert course.tally.share(SITES[:6]) == 0.0


def test_a_row_has_the_commit_that_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an earlier call are kept, and the head of the file has the commit of the last."""
    monkeypatch.setattr(attacks.common, "commit", lambda: "abc")
    bench = attacks.Bench(argparse.Namespace(json=None), {}, {}, attacks.QUICK, [])
    bench.keep({"kind": "in-process", "attack": "none", "rule": "mean", "loss": 2.0})
    assert bench.rows[0]["commit"] == "abc"
    assert bench.rows[0]["over_clean"] == 1.0


def test_a_run_that_was_interrupted_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later call would not make the run again."""

    def interrupted(config: Any, **_: Any) -> None:
        config.folder.mkdir(parents=True)
        content = {"phase": "stopped", "reason": "interrupted"}
        (config.folder / "summary.json").write_text(json.dumps(content))

    monkeypatch.setattr(process.dilocox, "train", interrupted)
    with pytest.raises(SystemExit, match="real: none: the run was stopped: interrupted"):
        process.main(0, tmp_path, 4)


def test_a_loss_above_knowing_nothing_is_ruined() -> None:
    assert attacks.over_clean({"loss": 24.5}, 2.5) is None
    assert attacks.over_clean({"loss": None}, 2.5) is None
    assert attacks.over_clean({"loss": 3.0}, 2.5) == 1.2
