"""A run's adapters: exported alone or merged with their base, sampled from, and in a release."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dilocox.config.adapter import AdapterSection
from dilocox.config.run_config import ModelSection
from dilocox.errors import CheckpointError, ConfigError
from dilocox.models import Published, load_model_config
from dilocox.models.adapter import adapter_shapes
from dilocox.models.adapter_export import finish_adapter_folder, write_adapter_stage
from dilocox.tools.serving.tokens import end_tokens
from dilocox.training.run_model import export, generate
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from tests.support.base_model import write_base

pytestmark = pytest.mark.waits
LORA = AdapterSection(rank=3, use_rslora=True)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with random adapters, beside their base model."""
    return run_in(tmp_path_factory.mktemp("adapters"))


def run_in(root: Path, ends_of_turn: tuple[int, ...] = ()) -> Path:
    model = ModelSection(path=str(write_base(root / "base")))
    config, folder = load_model_config(model, None), root / "run" / "model"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in adapter_shapes(config, LORA).items()
    }
    write_adapter_stage(folder, 0, tensors, Published())
    finish_adapter_folder(folder, config, model, LORA, root / "base", ends_of_turn)
    return root / "run"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(24).view(2, 12)).logits
    return found


@pytest.mark.parametrize(
    ("dtype", "kind", "off"), [("fp32", torch.float32, 1e-5), ("bf16", torch.bfloat16, 5e-2)]
)
def test_merged_and_unmerged_models_agree(
    run_folder: Path, tmp_path: Path, dtype: str, kind: torch.dtype, off: float
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = export(run_folder, tmp_path / "merged", dtype, merge=True)
    assert not (merged / ADAPTER_CONFIG).exists()
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert plain.dtype == kind
    assert AutoTokenizer.from_pretrained(merged).eos_token == "<|endoftext|>"
    own = AutoPeftModelForCausalLM.from_pretrained(run_folder / "model")
    base = AutoModelForCausalLM.from_pretrained(run_folder.parent / "base")
    assert torch.allclose(logits(plain).float(), logits(own), atol=off)
    assert not torch.allclose(logits(base), logits(own), atol=0.1)


def test_a_merged_model_stops_where_answers_end(tmp_path: Path) -> None:
    """Also where the base's own settings do not have the end of the template's turns."""
    from transformers import AutoTokenizer

    run = run_in(tmp_path, ends_of_turn=(7,))
    end = AutoTokenizer.from_pretrained(tmp_path / "base").eos_token_id
    for folder in (run / "model", export(run, tmp_path / "merged", merge=True)):
        said = json.loads((folder / "generation_config.json").read_text())
        assert said["eos_token_id"] == [end, 7]
        assert "transformers_version" not in said
    assert end_tokens(tmp_path / "merged") == [end, 7]


def test_adapters_alone_are_exported_as_they_are(run_folder: Path, tmp_path: Path) -> None:
    before = load_file(run_folder / "model" / ADAPTER_FILE)
    copied = export(run_folder, tmp_path / "same")
    half = export(run_folder, tmp_path / "half", "bf16")
    for file in (run_folder / "model").iterdir():
        if file.name != ADAPTER_FILE:
            assert (copied / file.name).read_bytes() == file.read_bytes()
    for name, tensor in load_file(half / ADAPTER_FILE).items():
        assert torch.equal(tensor, before[name].bfloat16())
    assert load_file(copied / ADAPTER_FILE).keys() == before.keys()


def test_text_comes_from_base_and_adapters(run_folder: Path, tmp_path: Path) -> None:
    merged = export(run_folder, tmp_path / "merged", merge=True)
    own, whole, base = (
        generate(each, "def ", tokens=8, temperature=0)
        for each in (run_folder, merged, run_folder.parent / "base")
    )
    assert own == whole
    assert own != base


def test_what_is_refused(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to merge"):
        export(run_folder.parent / "base", tmp_path / "new", merge=True)
    lost = tmp_path / "lost"
    shutil.copytree(run_folder / "model", lost)
    said = (lost / ADAPTER_CONFIG).read_text()
    (lost / ADAPTER_CONFIG).write_text(said.replace(str(run_folder.parent), "/nowhere"))
    with pytest.raises(CheckpointError, match=r"its base model /nowhere/base .*"):
        export(lost, tmp_path / "new", merge=True)
    (lost / ADAPTER_FILE).unlink()
    with pytest.raises(CheckpointError, match="pickled adapters are not read"):
        generate(lost, "def ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["lost"]


def test_a_release_says_what_the_adapters_belong_to(run_folder: Path, tmp_path: Path) -> None:
    from dilocox.tools.release import release

    (run_folder / "run.toml").write_text(
        f'[model]\npath = "{run_folder.parent / "base"}"\n[adapter]\nrank = 3\n'
        '[outer]\nmethod = "diloco"\n[sites.a]\n'
    )
    key = tmp_path / "key.pem"
    made = release.release(
        run_folder, tmp_path / "out", dtype="fp32", licence=None, key=key, model=None, data=None
    )
    card = (made.folder / "README.md").read_text()
    assert "library_name: peft" in card
    assert "LoRA adapters for base, of " in card.replace("\\", "")
    assert "| base model | base |" in card
    assert (made.folder / ADAPTER_FILE).is_file()
