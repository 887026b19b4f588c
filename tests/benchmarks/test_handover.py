"""The benchmark of handovers, where a run fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import handover


def test_codecs_measured_before_a_failure_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(codec: str, _rounds: int) -> list[dict[str, Any]]:
        if codec == "topk:64":
            raise handover.common.CommandError("dilocox train x.toml: ended with code 1")
        return [{"codec": codec, "goes_on_with": "left alone", "val_loss": 4.0}]

    file = tmp_path / "found.json"
    monkeypatch.setattr(handover, "compare", compare)
    monkeypatch.setattr(handover.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(sys, "argv", ["handover.py", "--json", str(file)])
    assert handover.main() == 1
    assert [row["codec"] for row in json.loads(file.read_text())["rows"]] == ["int4"]
    assert "handover: dilocox train x.toml: ended with code 1" in capsys.readouterr().err
