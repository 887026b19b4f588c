"""Buffers that a model saves are published and handed over as the run began with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.data import TokenFiles
from dilocox.errors import ModelError
from dilocox.models import load_model_config
from dilocox.training.builder import ModelPlan, RankParts, RankPlace
from dilocox.training.checkpointing import Checkpointer
from dilocox.training.portable_checkpoint_export import saved_buffers
from tests.support.architectures import BUFFERS, ROUTED, reference_model


def run_of(root: Path, stages: int = 1, **model: Any) -> RunConfig:
    """A run of the routed model, or of the `model` that is given."""
    return resolve_run(
        {
            "run": {"folder": str(root / "run")},
            "model": model or {"architecture": ROUTED},
            "site": {"stages": stages, "batch_size": 4, "micro_batch_size": 1},
            "data": {"sequence_length": 32},
            "sites": {"paris": {}},
        }
    )


def routed_model() -> torch.nn.Module:
    """Random values everywhere, the buffers included."""
    model = reference_model(load_model_config(run_of(Path()).model, 96))
    for number, name in enumerate(BUFFERS):
        model.get_buffer(name).copy_(torch.arange(4.0) + 10 * number)
    return model


def test_an_export_holds_saved_buffers_beside_the_anchor(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run, model = run_of(tmp_path), routed_model()
    anchor = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = SimpleNamespace(layout=SimpleNamespace(views=lambda _: anchor), anchor=None)
    rank = SimpleNamespace(
        place=RankPlace("paris", 0, 0),
        blueprint=ModelPlan.of(run, 96),
        mesh=SimpleNamespace(stages=1, shards=1, gather_names=lambda names: [names]),
        model=SimpleNamespace(
            saved_buffers=lambda: {name: model.get_buffer(name) for name in BUFFERS}
        ),
        states=[state],
    )
    files = SimpleNamespace(tokenizer_folder=None, ends_of_turn=())
    checkpointer = Checkpointer(
        run,
        cast(RankParts, rank),
        cast(TokenFiles, files),
        True,
        cast(Any, None),
        None,
        lambda: None,
    )
    assert checkpointer.export(cast(RankParts, rank), tmp_path / "model") == ""
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_a_handover_takes_them_from_what_the_run_began_with(tmp_path: Path) -> None:
    model = routed_model()
    model.save_pretrained(tmp_path / "in")  # type: ignore[operator]
    for stages in (1, 2):
        fresh = run_of(tmp_path, stages)
        found = saved_buffers(fresh, ModelPlan.of(fresh, 96))
        assert [name for stage in found for name in stage] == BUFFERS
        assert all(not tensor.any() for stage in found for tensor in stage.values())
        trained = run_of(tmp_path, stages, path=str(tmp_path / "in"))
        blueprint = ModelPlan.of(trained, None)
        found = saved_buffers(trained, blueprint)
        assert [name for stage in found for name in stage] == BUFFERS
        for name, tensor in (item for stage in found for item in stage.items()):
            assert torch.equal(tensor, model.get_buffer(name))
    assert len(found) == 2
    (tmp_path / "in" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        saved_buffers(trained, blueprint)


def test_nothing_is_read_for_a_model_without_any(tmp_path: Path) -> None:
    """Its handover needs no weights but the checkpoint's."""
    keys = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    plain = run_of(tmp_path, architecture={"model_type": "llama", **keys})
    load_model_config(plain.model, 96).save_pretrained(tmp_path / "in")
    run = run_of(tmp_path, path=str(tmp_path / "in"))
    assert saved_buffers(run, ModelPlan.of(run, None)) == [{}]
