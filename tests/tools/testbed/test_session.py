"""What `dilocox lab` refuses before it makes a lab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import TrainingError
from dilocox.tools.testbed import session
from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.session import Session

pytestmark = pytest.mark.alone


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    def no_lab(*_: Any, **__: Any) -> Any:
        raise AssertionError("a lab was made")

    monkeypatch.setattr(session, "Lab", no_lab)
    raw = {"run": {"folder": str(tmp_path / "run")}, "model": {"path": "x"}}
    return resolve_run({**raw, "sites": {"paris": {}, "lyon": {}}})


def hold(config: RunConfig, alone: bool, json_file: Path | None = None) -> None:
    made = Session(config, None, overwrite=False, warm_up=2, trace=False, alone=alone)
    made.hold("20mbit", [], None, 0.0, json_file)


def test_a_place_for_figures_that_is_not_there(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"--json .*figures.json: no folder .*out; make it first"):
        hold(config, False, tmp_path / "out" / "figures.json")


def test_a_run_of_a_site_by_itself_that_is_there_already(config: RunConfig, tmp_path: Path) -> None:
    held = tmp_path / "run-lab-lyon"
    held.mkdir()
    (held / "run.toml").write_text("")
    with pytest.raises(AssertionError, match="a lab was made"):
        hold(config, alone=False)
    with pytest.raises(TrainingError, match="run-lab-lyon: holds a run already"):
        hold(config, alone=True)
