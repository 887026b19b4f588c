"""A model that is published in bf16 and in several files: verified, exported, sampled from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dilocox
from dilocox.record.verify import Places, verify
from dilocox.report.folder import read_run
from tests.e2e.harness import PATIENT, Workshop

SETS = (
    "outer.rounds=2",
    "checkpoint.every_rounds=0",
    "checkpoint.published_dtype=bf16",
    "checkpoint.published_file_size=20kB",
    PATIENT,
)


@pytest.fixture(scope="module")
def published(shared_workshop: Workshop) -> Path:
    return shared_workshop.train("published", *SETS).folder


def bad(folder: Path, model: Path | None = None) -> dict[str, str]:
    report = verify(Places(folder, model=model), lambda what, share: None)
    return {f.claim.name: f.verdict for f in report.findings if f.verdict != "PASS"}


def test_a_rounded_model_is_verified(published: Path) -> None:
    files = sorted((published / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert {t.dtype for path in files for t in load_file(path).values()} == {torch.bfloat16}
    assert json.loads((published / "model/config.json").read_text())["dtype"] == "bfloat16"
    assert bad(published) == {}
    said = read_run(published)
    assert said.parameters is not None
    assert [name for name, _ in said.model if name.endswith(".safetensors")] == [
        path.name for path in files
    ]


def test_another_weight_is_found(published: Path, tmp_path: Path) -> None:
    """One that rounds to the same bf16, too: it is not the one that was published."""
    for change in (2**-6, 2**-20):
        model = tmp_path / str(change)
        shutil.copytree(published / "model", model)
        path = sorted(model.glob("*.safetensors"))[1]
        tensors = load_file(path)
        name = sorted(tensors)[0]
        changed = tensors[name].float()
        changed.view(-1)[0] = changed.view(-1)[0] * (1 + change)
        save_file(tensors | {name: changed}, path, metadata={"format": "pt"})
        assert bad(published, model) == {"model": "FAIL"}


def test_other_commands_take_it(published: Path, tmp_path: Path) -> None:
    text = dilocox.generate(published, "def main", tokens=4, seed=1)
    assert text.startswith("def main")
    wide = dilocox.export(published, tmp_path / "wide", "fp32")
    own = {
        name: tensor
        for path in sorted((published / "model").glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    for path in wide.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, own[name].float())
    # The values are those that were signed, whatever holds them.
    index = wide / "config.json"
    shutil.copy(published / "model" / "config.json", index)
    shutil.copy(published / "model" / "model.safetensors.index.json", wide)
    assert bad(published, wide) == {}
