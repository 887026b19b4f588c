"""Adapters: their names, first values and folder are PEFT's, however the model is cut."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dilocox.config.adapter import AdapterSection
from dilocox.config.run_config import ModelSection
from dilocox.errors import CheckpointError, ConfigError, ModelError
from dilocox.models import (
    ModelChunk,
    Published,
    adapter,
    build_chunk,
    load_model_config,
    materialise,
    plan_cut,
)
from dilocox.models.adapter import adapter_shapes, is_adapter, target_names, trained_shapes
from dilocox.models.adapter_export import finish_adapter_folder, write_adapter_stage
from dilocox.models.adapter_folder import AdapterFolder
from dilocox.models.adapter_weights import AdapterWeights, fixed_values, with_fixed
from dilocox.models.base_weights import base_digest
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from tests.support.architectures import (
    BIASED,
    BUFFERS,
    ROUTED,
    VOCABULARY,
    StateSource,
    reference_model,
    run,
    small_config,
    token_ids,
)

TYPES = ["qwen3", "gemma3_text", "gpt_neox", "opt-projected", "qwen3_moe"]
LORA = AdapterSection(rank=3, alpha=6.0)
B_ALONE = AdapterSection(rank=3, alpha=6.0, freeze_a=True)


def adapted(
    config: Any,
    chunks: int,
    reference: torch.nn.Module,
    seed: int,
    adapter: AdapterSection = LORA,
) -> list[ModelChunk]:
    """A model with adapters, cut and filled."""
    source = AdapterWeights(config, adapter, seed, StateSource(reference))
    made = []
    for spec in plan_cut(config, chunks, 16, adapter):
        chunk = build_chunk(
            config, spec, attention="sdpa", activation_checkpointing=False, adapter=adapter
        )
        assert all(parameter.is_meta for parameter in chunk.parameters())
        own = sum(p.numel() for p in chunk.parameters() if p.requires_grad)
        every = sum(p.numel() for name, p in chunk.named_parameters() if ".lora_" in name)
        assert (spec.trained, spec.frozen) == (own, spec.parameters + every - own)
        materialise(chunk, source, "cpu")
        made.append(chunk.eval())
    return made


def trained(chunks: list[ModelChunk]) -> dict[str, torch.Tensor]:
    """The adapters of all chunks by PEFT's names."""
    return {
        chunk.full_name(name): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def randomise(tensors: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in sorted(tensors):
            tensors[name].normal_(0.0, 0.2, generator=generator)


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, id=f"{name}-{'tied' if tied else 'untied'}", marks=marks)
        for number, name in enumerate(TYPES)
        for tied in (False, True)
        for marks in ([] if tied == (number % 2 == 0) else [pytest.mark.slow],)
    ],
)
def test_peft_computes_the_same_with_the_adapters_of_every_stage(
    name: str, tied: bool, tmp_path: Path
) -> None:
    from peft import PeftModel

    config = small_config(name, tie_word_embeddings=tied)
    reference, ids = reference_model(config), token_ids()
    chunks = adapted(config, 3, reference, seed=1)
    found = trained(chunks)
    assert list(found) == list(adapter_shapes(config, LORA))
    assert all(is_adapter(each) for each in found)
    base = {f for c in chunks for f in c.full_names().values() if not is_adapter(f)}
    assert base >= set(reference.state_dict()) - {"lm_head.weight"}
    # B is zero at the start.
    plain = reference(ids).logits
    assert torch.allclose(run(chunks, ids), plain, atol=1e-5)

    randomise(found, seed=2)
    model = ModelSection(path="somewhere/base")
    for stage, chunk in enumerate(chunks):
        write_adapter_stage(tmp_path, stage, trained([chunk]), Published())
    finish_adapter_folder(tmp_path, config, model, LORA, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ADAPTER_CONFIG, ADAPTER_FILE]
    loaded = PeftModel.from_pretrained(reference, tmp_path).eval()
    logits = run(chunks, ids)
    assert not torch.allclose(logits, plain, atol=1e-2)
    assert torch.allclose(loaded(ids).logits, logits, atol=1e-5)
    merged = loaded.merge_and_unload()
    assert torch.allclose(merged(ids).logits, logits, atol=1e-4)


def test_readers_of_a_folder_see_no_warning_of_its_libraries(tmp_path: Path) -> None:
    """Commands that load adapters print to users."""
    config = small_config("qwen3")
    reference = reference_model(config)
    write_adapter_stage(tmp_path, 0, trained(adapted(config, 1, reference, seed=1)), Published())
    finish_adapter_folder(tmp_path, config, ModelSection(path="a/base"), LORA, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdapterFolder.of(tmp_path).added_to(reference)


def test_first_values_do_not_depend_on_the_cut_and_are_distributed_as_pefts() -> None:
    config = small_config("qwen3")
    reference = reference_model(config)
    whole, cut = (trained(adapted(config, count, reference, seed=5)) for count in (1, 4))
    other = trained(adapted(config, 1, reference, seed=6))
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert torch.equal(value, cut[name]), name
        if ".lora_B." in name:
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
            # Uniform over ±1/sqrt(columns): `nn.init.kaiming_uniform_(a=sqrt(5))`.
            bound = value.shape[1] ** -0.5
            assert 0.8 * bound < value.abs().max() <= bound


def test_with_a_frozen_pefts_gradients_of_b_alone_are_computed(tmp_path: Path) -> None:
    from peft import PeftModel

    config = small_config("qwen3")
    reference, ids = reference_model(config), token_ids()
    chunks = adapted(config, 2, reference, seed=5, adapter=B_ALONE)
    found = trained(chunks)
    assert list(found) == list(trained_shapes(config, B_ALONE))
    assert all(".lora_B." in name for name in found)
    randomise(found, seed=2)
    for stage, chunk in enumerate(chunks):
        whole = with_fixed(trained([chunk]), config, B_ALONE, 5)
        write_adapter_stage(tmp_path, stage, whole, Published())
    finish_adapter_folder(tmp_path, config, ModelSection(path="base"), B_ALONE, None)
    assert list(load_file(tmp_path / ADAPTER_FILE)) == sorted(adapter_shapes(config, B_ALONE))

    loaded: Any = PeftModel.from_pretrained(reference, tmp_path, is_trainable=True)
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_(".lora_B." in name)
    ours, theirs = run(chunks, ids), loaded(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    for name, parameter in loaded.named_parameters():
        if ".lora_B." in name:
            mine = found[name.replace(".default.", ".")].grad
            assert mine is not None
            assert torch.allclose(mine, parameter.grad, rtol=1e-4, atol=1e-7)
    assert all(p.grad is None for c in chunks for p in c.parameters() if not p.requires_grad)


def test_the_values_of_a_frozen_a_are_the_same_bits_everywhere() -> None:
    value = fixed_values("base_model.model.x.lora_A.weight", torch.Size([4, 300]), 3)
    bound = 300**-0.5
    assert 0.95 * bound < value.abs().max() <= bound
    # Every value is a multiple of 2^-23 times the bound, rounded once.
    steps = (value.double() / torch.tensor(bound).double() * 2**23).round()
    exact = (steps / 2**23).float() * torch.tensor(bound)
    assert torch.equal(exact, value)


def adapted_in_bf16(config: Any, source: StateSource) -> ModelChunk:
    (spec,) = plan_cut(config, 1, 16, LORA)
    chunk = build_chunk(
        config,
        spec,
        attention="sdpa",
        activation_checkpointing=False,
        dtype=torch.bfloat16,
        adapter=LORA,
    )
    materialise(chunk, AdapterWeights(config, LORA, 0, source), "cpu")
    return chunk


def test_frozen_weights_have_the_dtype_that_is_asked_for_and_adapters_are_fp32() -> None:
    config = small_config("qwen3", tie_word_embeddings=True)
    chunk = adapted_in_bf16(config, StateSource(reference_model(config)))
    dtypes = {(p.requires_grad, p.dtype) for p in chunk.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert chunk.lm.lm_head.weight is chunk.lm.model.embed_tokens.weight  # type: ignore[union-attr]


def test_biases_of_routers_are_not_rounded() -> None:
    config = load_model_config(ModelSection(architecture=BIASED), VOCABULARY)
    source = StateSource(reference_model(config))
    for name in BUFFERS:
        source.state[name] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    chunk = adapted_in_bf16(config, source)
    found = chunk.saved_buffers()
    assert list(found) == BUFFERS
    assert all(torch.equal(buffer, source.state[name]) for name, buffer in found.items())
    assert {p.dtype for p in chunk.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_targets_are_checked() -> None:
    config = small_config("qwen3")
    assert "down_proj" in target_names(config, LORA)
    assert "lm_head" not in target_names(config, LORA)
    assert target_names(config, AdapterSection(targets=["v_proj", "q_proj"])) == (
        "q_proj",
        "v_proj",
    )
    with pytest.raises(ConfigError, match=r"no linear layer 'q_prj' .* did you mean q_proj"):
        target_names(config, AdapterSection(targets=["q_prj"]))
    with pytest.raises(ConfigError, match="no linear layer 'lm_head'"):
        target_names(config, AdapterSection(targets=["lm_head"]))


def test_names_that_peft_takes_for_experts_are_left_out(tmp_path: Path) -> None:
    """Shared experts and dense layers have the former names of layers that are in experts now."""
    from peft import PeftModel

    config = load_model_config(ModelSection(architecture=ROUTED), VOCABULARY)
    assert target_names(config, LORA) == ("k_proj", "o_proj", "q_proj", "v_proj")
    reference, ids = reference_model(config), token_ids()
    chunks = adapted(config, 2, reference, seed=1)
    found = trained(chunks)
    assert list(found) == list(adapter_shapes(config, LORA))
    randomise(found, seed=2)
    for stage, chunk in enumerate(chunks):
        write_adapter_stage(tmp_path, stage, trained([chunk]), Published())
    finish_adapter_folder(tmp_path, config, ModelSection(path="base"), LORA, None)
    loaded = PeftModel.from_pretrained(reference, tmp_path).eval()
    assert torch.allclose(loaded(ids).logits, run(chunks, ids), atol=1e-5)

    for name in ("gate_proj", "down_proj"):
        experts = AdapterSection(targets=["q_proj", name])
        said = rf"peft takes '{name}' of .* for its experts, .* has k_proj, o_proj, q_proj, v_proj"
        with pytest.raises(ConfigError, match=said):
            plan_cut(config, 1, 16, experts)


def test_adapters_that_peft_puts_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release may take further names for experts."""
    config = load_model_config(ModelSection(architecture=ROUTED), VOCABULARY)
    monkeypatch.setattr(adapter, "_names_of_experts", lambda *_: set())
    with pytest.raises(ModelError, match=r"mlp\.experts.*, which is no linear layer of adapter"):
        plan_cut(config, 1, 16, LORA)


def test_without_peft_the_line_to_install_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'dilocox\[adapters\]'"):
        adapter_shapes(small_config("qwen3"), LORA)


def test_a_folder_that_lacks_a_stage_is_not_finished(tmp_path: Path) -> None:
    config = small_config("qwen3")
    chunks = adapted(config, 2, reference_model(config), seed=1)
    write_adapter_stage(tmp_path, 0, trained(chunks[:1]), Published())
    with pytest.raises(CheckpointError, match="is in no stage's file"):
        finish_adapter_folder(tmp_path, config, ModelSection(path="base"), LORA, None)
    assert not (tmp_path / ADAPTER_CONFIG).exists()


def test_the_configuration_names_the_base_and_no_versions(tmp_path: Path) -> None:
    config = small_config("qwen3")
    chunks = adapted(config, 1, reference_model(config), seed=1)
    write_adapter_stage(tmp_path, 0, trained(chunks), Published(bf16=True))
    model = ModelSection(path="org/base", revision="v1")
    finish_adapter_folder(tmp_path, config, model, LORA, None)
    said = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert said["base_model_name_or_path"] == "org/base"
    assert said["revision"] == "v1"
    assert (said["r"], said["lora_alpha"], said["peft_type"]) == (3, 6, "LORA")
    assert said["target_modules"] == list(target_names(config, LORA))
    assert "peft_version" not in said
    tensors = load_file(tmp_path / ADAPTER_FILE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_digest_of_a_base_is_of_its_tensors_and_its_configuration(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    save_file(tensors, one / "model.safetensors")
    save_file({"b": tensors["b"]}, two / "x.safetensors", metadata={"format": "pt"})
    save_file({"a": tensors["a"]}, two / "y.safetensors")
    index = {"weight_map": {"a": "y.safetensors", "b": "x.safetensors"}}
    (two / "model.safetensors.index.json").write_text(json.dumps(index))
    (two / "config.json").write_text('{"use_cache": true, "model_type": "llama"}')
    first = base_digest(one)
    assert base_digest(two) == first

    (two / "config.json").write_text('{"model_type": "llama", "rope_theta": 5}')
    assert base_digest(two) != first
    tensors["b"][3] = 1.0000001
    save_file(tensors, one / "model.safetensors")
    assert base_digest(one) != first
    whole = (one / "model.safetensors").read_bytes()
    (one / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ModelError, match="fetch the model again"):
        base_digest(one)
