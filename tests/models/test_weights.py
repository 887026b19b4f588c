"""Weights in: fresh ones do not depend on the cut, pretrained ones arrive to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.models import load_model_config, open_weights, probe_weights
from dilocox.models.weight_source import FreshWeights
from tests.support.architectures import (
    ARCHITECTURES,
    cut_model,
    reference_model,
    run,
    section,
    small_config,
    token_ids,
)


def _fresh(name: str, chunks: int, seed: int, **keys: Any) -> dict[str, torch.Tensor]:
    config = small_config(name, **keys)
    source = open_weights(section(name, **keys), config, seed)
    values = {}
    for chunk in cut_model(config, chunks, source):
        state = chunk.state_dict()
        values.update({full: state[local] for local, full in chunk.full_names().items()})
    return values


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_neox", "opt", "qwen3_moe"])
def test_fresh_weights_do_not_depend_on_the_cut(name: str, tied: bool) -> None:
    whole = _fresh(name, 1, seed=5, tie_word_embeddings=tied)
    cut = _fresh(name, 3, seed=5, tie_word_embeddings=tied)
    extra = {"lm_head.weight"} if tied else set()
    assert set(cut) - set(whole) == extra
    for full, value in whole.items():
        assert torch.equal(value, cut[full]), full
    if tied:
        embedding = cut[next(n for n in cut if "embed" in n and "positions" not in n)]
        assert torch.equal(cut["lm_head.weight"], embedding)
    other = _fresh(name, 1, seed=6, tie_word_embeddings=tied)
    assert any(not torch.equal(value, other[full]) for full, value in whole.items())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fresh_weights_are_distributed_as_the_models_own(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = small_config(name, tie_word_embeddings=False)
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    fresh = _fresh(name, 2, seed=0, tie_word_embeddings=False)
    assert own.keys() == fresh.keys()
    for full, value in fresh.items():
        assert value.shape == own[full].shape
        assert value.dtype == own[full].dtype
        if own[full].unique().numel() <= 1:
            assert torch.equal(value, own[full]), full  # norms and biases
        else:
            error = 6 * own[full].std() / own[full].numel() ** 0.5
            assert abs(value.mean() - own[full].mean()) < error, full
            assert abs(value.std() / own[full].std() - 1) < 0.25, full
            assert not torch.equal(value, own[full])
    matrices = [v for n, v in fresh.items() if n.endswith("proj.weight")]
    for a, b in pairwise(matrices):
        assert a.shape != b.shape or not torch.equal(a, b)


def test_fresh_weights_leave_the_callers_generator_alone() -> None:
    source = FreshWeights(small_config("qwen3"), 0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = source.tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(source.tensor("model.layers.0.mlp.up_proj.weight"), first)
    with pytest.raises(ModelError, match="no such parameter"):
        source.tensor("model.layers.99.mlp.up_proj.weight")


def test_fresh_weights_hold_one_module_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("llama")
    source = FreshWeights(config, 0)
    largest = 0
    make = torch.empty_like

    def counted(tensor: torch.Tensor, **keys: Any) -> torch.Tensor:
        nonlocal largest
        made = make(tensor, **keys)
        if not made.is_meta:
            largest = max(largest, sum(t.numel() for t in source._ready.values()) + made.numel())
        return made

    monkeypatch.setattr(torch, "empty_like", counted)
    for name in reference_model(config).state_dict():
        source.tensor(name)
    assert largest == 96 * 32
    assert not source._ready


def test_a_tensor_that_the_model_leaves_unset_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    source = FreshWeights(small_config("llama"), 0)
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*does not initialise"):
        source.tensor("model.norm.weight")


@contextmanager
def _saved(name: str, folder: Path, shard: str, **keys: Any) -> Iterator[tuple[Any, Any]]:
    config = small_config(name, **keys)
    model = reference_model(config, seed=4)
    model.save_pretrained(folder, max_shard_size=shard)  # type: ignore[operator]
    yield model, ModelSection(path=str(folder))


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_neox", "opt", "qwen3_moe"])
def test_pretrained_weights_arrive_to_the_bit(
    name: str, tied: bool, shard: str, tmp_path: Path
) -> None:
    with _saved(name, tmp_path, shard, tie_word_embeddings=tied) as (model, path):
        assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
        config = load_model_config(path, 96)
        chunks = cut_model(config, 3, open_weights(path, config, seed=0))
        expected = model.state_dict()
        for chunk in chunks:
            state = chunk.state_dict()
            for local, full in chunk.full_names().items():
                assert torch.equal(state[local], expected[full]), full
        ids = token_ids()
        with torch.no_grad():
            assert torch.equal(run(chunks, ids), model(input_ids=ids).logits)


def test_half_precision_checkpoints_become_fp32(tmp_path: Path) -> None:
    config = small_config("llama")
    model = reference_model(config).bfloat16()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    path = ModelSection(path=str(tmp_path))
    source = open_weights(path, load_model_config(path, None), 0)
    value = source.tensor("model.norm.weight")
    assert value.dtype == torch.float32
    assert torch.equal(value, model.state_dict()["model.norm.weight"].float())


def test_path_without_pretrained_starts_fresh(tmp_path: Path) -> None:
    with _saved("llama", tmp_path, "1GB") as (model, _):
        path = ModelSection(path=str(tmp_path), pretrained=False)
        source = open_weights(path, load_model_config(path, None), 0)
        name = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(source.tensor(name), model.state_dict()[name])


def test_checkpoints_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with _saved("llama", tmp_path, "1GB", tie_word_embeddings=True) as (_, path):
        config = load_model_config(path, None)
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)

        save_file({**tensors, "lm_head.weight": torch.zeros(96, 32)}, file)
        source = open_weights(path, config, 0)
        with pytest.raises(ModelError, match=r"ties lm_head\.weight.*differ"):
            source.tensor("lm_head.weight")
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 0}, file)
        assert open_weights(path, config, 0).tensor("lm_head.weight").shape == (96, 32)

        head_only = dict(tensors)
        embedding = head_only.pop("model.embed_tokens.weight")
        save_file({**head_only, "lm_head.weight": embedding}, file)
        read = open_weights(path, config, 0).tensor("model.embed_tokens.weight")
        assert torch.equal(read, embedding)

        save_file({**tensors, "model.norm.weight": torch.ones(5)}, file)
        with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \[5\]"):
            open_weights(path, config, 0).tensor("model.norm.weight")

        save_file({k: v for k, v in tensors.items() if "layers.3" not in k}, file)
        with pytest.raises(ModelError, match=r"lack model\.layers\.3\..* and 8 more"):
            open_weights(path, config, 0)

        file.write_bytes(b"not safetensors")
        with pytest.raises(ModelError, match="cannot be read"):
            open_weights(path, config, 0)

        file.unlink()
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ModelError, match=r"pickled weights \(\.bin\) are not read: convert"):
            open_weights(path, config, 0)


def test_an_index_may_only_name_files_beside_it(tmp_path: Path) -> None:
    with _saved("llama", tmp_path, "20KB") as (_, path):
        config = load_model_config(path, None)
        index = tmp_path / "model.safetensors.index.json"
        names = json.loads(index.read_text())
        first = next(iter(names["weight_map"]))
        names["weight_map"][first] = "../other.safetensors"
        index.write_text(json.dumps(names))
        with pytest.raises(ModelError, match="is missing"):
            open_weights(path, config, 0)


def test_hub_names_are_fetched_as_safetensors_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(name: str, **keys: Any) -> str:
        asked.update(keys, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with _saved("llama", tmp_path, "1GB") as (model, _):
        config = small_config("llama")
        source = open_weights(ModelSection(path="org/model", revision="r1"), config, 0)
        value = source.tensor("model.norm.weight")
        assert torch.equal(value, model.state_dict()["model.norm.weight"])
    assert (asked["name"], asked["revision"]) == ("org/model", "r1")
    assert "*.bin" not in asked["allow_patterns"]

    def offline(name: str, **_: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"org/model: no such folder.*no route.*local folder"):
        open_weights(ModelSection(path="org/model"), config, 0)


def test_a_type_that_does_not_set_all_its_tensors_is_refused_on_a_tiny_copy() -> None:
    keys = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 64}
    model = ModelSection(architecture={"model_type": "apertus", **keys})
    with pytest.raises(
        ModelError, match=r"alpha_p: the model's code does not initialise it; start"
    ):
        probe_weights(load_model_config(model, 96))


@pytest.mark.parametrize("name", ["qwen3", "opt-projected", "qwen3_moe"])
def test_types_that_set_all_their_tensors_are_taken(name: str) -> None:
    probe_weights(small_config(name))
