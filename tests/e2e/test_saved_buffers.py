"""A model that saves buffers beside its parameters: trained, verified, loaded, handed over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forge import Forge
from tests.support.harness import Workshop, verdicts

pytestmark = pytest.mark.stops

MODEL = """\
[model.architecture]
model_type = "glm4_moe"
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 64
moe_intermediate_size = 32
n_routed_experts = 4
num_experts_per_tok = 2
n_group = 1
topk_group = 1
first_k_dense_replace = 1
"""
BUFFER = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.slow
def test_saved_buffers_are_published_and_handed_over(
    workshop: Workshop, forge: Forge, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    words = workshop.run_file(
        "buffers", "outer.rounds=2", "outer.inner_steps=2", sites=("paris",), model=MODEL
    )
    run = forge.command(workshop, "buffers", "train", *words)
    assert run.wait() == 0, run.output()
    model = run.folder / "model"
    loaded, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded.state_dict()[BUFFER], torch.zeros(4))
    assert verdicts(run.folder) == {}

    handed = tmp_path / "handed"
    over = forge.command(workshop, "buffers", "handover", str(run.folder), "--to", str(handed))
    assert over.wait() == 0, over.output()
    for file in sorted(model.glob("*.safetensors")):
        published, found = load_file(file), load_file(handed / file.name)
        assert published.keys() == found.keys()
        assert torch.equal(found.get(BUFFER, torch.zeros(4)), torch.zeros(4))
