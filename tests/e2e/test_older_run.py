"""A run that was begun before the modules were moved goes on, and is checked, after that.

`older_run.tar.xz` holds what a run of two sites of two stages had written when it was stopped after
round 7 of 14, by the code of commit 509e2eb: run file, text, token files, checkpoint, event log,
record with states for audits.
"""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest

from dilocox.cli.main import main
from tests.support.forge import Forge
from tests.support.harness import Workshop, verdicts

pytestmark = pytest.mark.runs

ARCHIVE = Path(__file__).parents[1] / "support" / "fixtures" / "older_run.tar.xz"
WEIGHTS = (
    "940b4796a6d16941b4ce6805b7ef3b205b49bf03529aba5e237199c085ee5c3e",
    "3d4037951339ef459dfaeb9e73b79f997ae565ea8f1283534f38af4960bb0bde",
)
"""SHA-256 of the model's files when the code that began the run went on with it."""


def test_a_run_from_before_the_move_goes_on(
    workshop: Workshop, forge: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the same bits, with everything that reads a run's folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    here = Workshop(tmp_path / "runs", tmp_path / "text", forge)
    sets = [f"run.folder={tmp_path}/runs/{{name}}", f"data.folder={tmp_path}/data"]
    given = [word for each in sets for word in ("--set", each)]
    run = forge.command(here, "before", "train", str(tmp_path / "run.toml"), *given, "--resume")
    try:
        assert run.wait() == 0, run.output()
    finally:
        here.end_all()
    files = sorted((run.folder / "model").glob("*.safetensors"))
    found = tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    assert [record["round"] for record in run.records()] == list(range(14))
    assert run.sequences_amiss() == (0, 0)
    assert verdicts(run.folder) == {"code": "NOT_RUN", "audits": "NOT_RUN", "beacon": "NOT_RUN"}
    printed = ""
    for *words, last in (
        ("audit", "--site", "paris", "--round", "3", str(run.folder)),
        ("audit", "--site", "paris", "--round", "9", str(run.folder)),
        ("report", "--out", str(tmp_path / "page.html"), str(run.folder)),
        ("status", str(run.folder)),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*words, last])
        printed += capsys.readouterr().out
        assert ended.value.code in (None, 0), printed
    # Other processors give other bits: the weights of the first theta_0 tell which these are.
    if "EXACT       round 3" in printed:
        assert found == WEIGHTS
    assert "finished" in printed
    assert "<title>" in (tmp_path / "page.html").read_text()
