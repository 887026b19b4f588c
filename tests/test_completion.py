"""The completion at the end of a run: a run that is finished is not failed by it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig
from dilocox.data import prepare
from dilocox.training.launch import local
from dilocox.training.launch.local import Result
from tests.training.launch.test_preflight import config, write_text

pytestmark = pytest.mark.waits


class Shown:
    """A display that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def step(self, text: str, share: float | None = None) -> None:
        """Nothing is shown in place."""

    def step_done(self) -> None:
        """Nothing was."""


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    write_text(tmp_path / "text", 0)
    made = config(tmp_path, "run", evaluation={"prompt": "def", "completion_tokens": 3})
    prepare(made.data, made.data_folder, made.run.seed)
    return made


def last_words(run: RunConfig) -> list[str]:
    shown: Any = Shown()
    local._last_words(run, Result("finished", "", {}, run.folder), shown)
    lines: list[str] = shown.lines
    assert any(line.startswith("model  ") for line in lines), "the rest is said in any case"
    return [line for line in lines if line.startswith("completion")]


def test_it_is_shown(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(folder: Path, prompt: str, **more: Any) -> str:
        return f"{prompt} {more['tokens']} {more['device']} {local.torch.get_num_threads()}"

    monkeypatch.setattr(local, "generate", generate)
    monkeypatch.setattr(local, "available_cores", lambda: 2)
    assert last_words(run) == ["completion        'def 3 cpu 2'"]


def test_a_model_that_cannot_be_sampled_ends_no_run(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*_: Any, **__: Any) -> str:
        raise MemoryError("no room for 28 GB")

    monkeypatch.setattr(local, "generate", generate)
    (line,) = last_words(run)
    assert "left out (_sample: MemoryError: no room for 28 GB)" in line
    assert line.endswith(f"; dilocox generate {run.folder} samples one")


def test_a_large_model_is_not_loaded(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "generate", lambda *_, **__: time.sleep(60.0))
    monkeypatch.setattr(local, "count_parameters", lambda hf_config: 7_400_000_000)
    assert last_words(run) == [
        "completion        left out, the model has 7.4G parameters; "
        f"dilocox generate {run.folder} samples one"
    ]


def test_commands_can_be_pasted_whatever_the_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "my runs" / "text", 0)
    run = config(tmp_path / "my runs", "run", evaluation={"prompt": "def", "completion_tokens": 3})
    prepare(run.data, run.data_folder, run.run.seed)
    monkeypatch.setattr(local, "count_parameters", lambda hf_config: 7_400_000_000)
    shown: Any = Shown()
    local._last_words(run, Result("finished", "", {}, run.folder), shown)
    said = "\n".join(shown.lines)
    assert f"; dilocox generate '{run.folder}' samples one" in said
    assert f"check it: dilocox verify '{run.folder}'" in said
