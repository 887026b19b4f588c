"""Advice at the start of a run: said once, and only where it applies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilocox.config.adapter import AdapterSection
from dilocox.config.model import ModelSection
from dilocox.config.run_config import RunConfig
from dilocox.training.launch import hints as hints_module
from dilocox.training.launch import preflight
from dilocox.training.launch.hints import hints
from dilocox.training.launch.preflight import Role
from dilocox.utils.adapter_files import ADAPTER_CONFIG
from tests.support.process_starts import config, prepared


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and token files, shared by the tests of this module."""
    return prepared(tmp_path_factory.mktemp("hints"))


@pytest.mark.parametrize(
    ("precision", "gpu", "native", "told"),
    [
        ("bf16", False, False, True),
        ("bf16", False, True, False),
        ("bf16", True, False, False),
        ("auto", False, False, False),
        ("fp32", False, False, False),
    ],
)
def test_bf16_without_instructions_is_told(
    place: Path, precision: str, gpu: bool, native: bool, told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hints_module, "ranks_use_gpu", lambda _: gpu)
    monkeypatch.setattr(hints_module, "cpu_multiplies_bf16", lambda: native)
    found = list(hints(config(place, site={"precision": precision}), alone=False))
    assert [line.startswith('site.precision = "bf16": this machine') for line in found] == (
        [True] * told
    )


def adapted(place: Path, base: str, adapters: Path, **data: str) -> RunConfig:
    """The run in `place`, from adapters on the model `base`."""
    run = config(place, site={"precision": "fp32"})
    parts = {
        "model": ModelSection(path=base),
        "adapter": AdapterSection(path=str(adapters)),
        "data": run.data.model_copy(update={"tokenizer": base, **data}),
    }
    return run.model_copy(update=parts)


@pytest.mark.parametrize(("named", "told"), [("org/other", 1), ("elsewhere/base", 0), (None, 0)])
def test_adapters_of_a_base_with_another_name_are_told(
    place: Path, tmp_path: Path, named: str | None, told: int
) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": named}))
    found = list(hints(adapted(place, "models/base", tmp_path), alone=False))
    said = (
        f"adapter.path {tmp_path}: names org/other as its base model, and model.path is "
        "models/base; make sure that they are the same model"
    )
    assert found == [said] * told


@pytest.mark.parametrize(
    ("ours", "data", "told"),
    [
        ("other", {}, 1),
        (None, {}, 1),
        ("theirs", {}, 0),
        ("other", {"chat_template": "chat.jinja"}, 0),
        ("other", {"format": "text"}, 0),
    ],
)
def test_adapters_of_another_chat_template_are_told(
    place: Path, tmp_path: Path, ours: str | None, data: dict[str, str], told: int
) -> None:
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    for folder in (base, adapters):
        folder.mkdir()
    (adapters / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": "base"}))
    (adapters / "chat_template.jinja").write_text("theirs")
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": ours}))
    run = adapted(place, str(base), adapters, **{"format": "chat", **data})
    said = (
        f"adapter.path {adapters}: has another chat template than data.tokenizer {base}; to "
        "write conversations as these adapters know them, set data.tokenizer = "
        f'"{adapters}"'
    )
    assert list(hints(run, alone=False)) == [said] * told


def test_the_congestion_control_matters_to_a_machine_with_one_site(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "congestion_hint", lambda *_: "slow lines")
    run = config(place, site={"precision": "fp32"})
    assert list(hints(run, alone=True)) == ["slow lines"]
    assert list(hints(run, alone=False)) == []


def test_every_command_that_trains_says_the_advice_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`join` under torchrun has no display, and other ranks of the site are silent."""
    asked: list[bool] = []

    def advice(_run: object, alone: bool) -> list[str]:
        asked.append(alone)
        return ["some advice"]

    monkeypatch.setattr(preflight, "hints", advice)
    run = config(place)
    preflight.check(run, Role("train"))
    preflight.check(run, Role("join", site="paris", url="https://localhost:1"))
    preflight.check(run, Role("rank", site="paris", url="https://localhost:1"))
    assert asked == [False, True]
    assert capsys.readouterr().err.count("some advice") == 2
