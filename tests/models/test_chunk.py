"""A cut model is the model: same logits to the bit, same gradients, same names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dilocox.config.adapter import AdapterSection
from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.models import (
    ModelChunk,
    bare_chunks,
    build_chunk,
    load_model_config,
    plan_cut,
    probe_cut,
    tied_pair,
)
from dilocox.models.partition_probe import tiny_config
from tests.support.architectures import (
    ARCHITECTURES,
    BUFFERS,
    ROUTED,
    StateSource,
    cut_model,
    reference_model,
    run,
    section,
    small_config,
    token_ids,
)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cut_logits_equal_the_unsplit_model_to_the_bit(name: str, tied: bool) -> None:
    config = small_config(name, tie_word_embeddings=tied)
    model = reference_model(config)
    assert (tied_pair(config) is not None) == tied
    ids = token_ids()
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        assert whole.std() > 1e-3
        for count in (1, 2, 4):
            chunks = [chunk.eval() for chunk in cut_model(config, count, StateSource(model))]
            hidden = chunks[0](ids)
            expected = 96 if count == 1 else config.hidden_size
            assert hidden.shape == (2, 12, expected)
            assert (run(chunks, ids) - whole).abs().max().item() == 0.0


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bare_chunks_have_the_names_and_shapes_of_those_that_are_filled(
    name: str, tied: bool
) -> None:
    config = small_config(name, tie_word_embeddings=tied)
    check_bare_chunks(config, 3, None)
    if name in ("qwen3", "gpt_neox"):
        check_bare_chunks(config, 1, None)
        base = "full" if name == "gpt_neox" else "nf4"
        check_bare_chunks(config, 2, AdapterSection(rank=2, base=base))


def test_bare_chunks_have_the_buffers_of_those_that_are_filled() -> None:
    config = load_model_config(ModelSection(architecture=ROUTED), 96)
    bare = check_bare_chunks(config, 3, None)
    assert [list(chunk.saved_buffers()) for chunk in bare] == [[], BUFFERS[:1], BUFFERS[1:]]


def check_bare_chunks(config: Any, count: int, adapter: AdapterSection | None) -> list[ModelChunk]:
    cut = plan_cut(config, count, 16, adapter)
    bare = bare_chunks(config, cut, adapter)
    assert len(bare) == count
    for spec, found in zip(cut, bare, strict=True):
        wanted = build_chunk(
            config, spec, attention="eager", activation_checkpointing=False, adapter=adapter
        )
        assert found.spec == spec
        assert found.full_names() == wanted.full_names()
        assert shapes(found.named_parameters()) == shapes(wanted.named_parameters())
        assert shapes(found.saved_buffers().items()) == shapes(wanted.saved_buffers().items())
    return bare


def shapes(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Size, bool]]:
    return [(name, tensor.shape, tensor.requires_grad) for name, tensor in tensors]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "opt"])
def test_cut_with_eager_attention_is_exact(name: str) -> None:
    config = small_config(name)
    model = reference_model(config, attention="eager")
    ids = token_ids()
    with torch.no_grad():
        chunks = cut_model(config, 3, StateSource(model), attention="eager")
        assert torch.equal(run(chunks, ids), model(input_ids=ids).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_neox", "opt"])
def test_gradients_of_the_chunks_are_those_of_the_whole(name: str, checkpointing: bool) -> None:
    config = small_config(name, tie_word_embeddings=False)
    model = reference_model(config).train()
    ids = token_ids()
    model(input_ids=ids).logits.square().mean().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    chunks = cut_model(config, 3, StateSource(model), activation_checkpointing=checkpointing)
    for chunk in chunks:
        chunk.train()
    run(chunks, ids).square().mean().backward()
    seen = {}
    for chunk in chunks:
        for local, parameter in chunk.named_parameters():
            seen[chunk.full_name(local)] = parameter.grad
    assert seen.keys() == expected.keys()
    for full, gradient in seen.items():
        assert gradient is not None, full
        assert torch.equal(gradient, expected[full]), full


def test_activation_checkpointing_runs_each_layer_twice() -> None:
    config = small_config("qwen3")
    for checkpointing, calls in ((False, 1), (True, 2)):
        (chunk,) = cut_model(
            config,
            1,
            StateSource(reference_model(config)),
            activation_checkpointing=checkpointing,
        )
        count = 0

        def hook(*_: object) -> None:
            nonlocal count
            count += 1

        chunk.layers[2].get_submodule("input_layernorm").register_forward_hook(hook)
        chunk(token_ids()).sum().backward()
        assert count == calls


def test_names_are_those_of_the_whole_model_and_each_has_one_owner() -> None:
    config = small_config("qwen2", tie_word_embeddings=False)
    expected = set(reference_model(config).state_dict())
    chunks = [
        build_chunk(config, spec, attention="sdpa", activation_checkpointing=False)
        for spec in plan_cut(config, 3, 16)
    ]
    names = [full for chunk in chunks for full in chunk.full_names().values()]
    assert sorted(names) == sorted(expected)
    second = chunks[1]
    first = second.spec.first_layer
    assert first > 0
    assert (
        second.full_name("lm.model.layers.0.self_attn.q_proj.weight")
        == f"model.layers.{first}.self_attn.q_proj.weight"
    )
    assert set(second.full_names()) == set(second.state_dict())
    assert len(second.layers) == second.spec.end_layer - first
    with pytest.raises(KeyError):
        second.full_name("lm.lm_head.weight")


def test_tied_head_is_shared_in_one_chunk_and_its_own_parameter_in_two() -> None:
    config = small_config("qwen3", tie_word_embeddings=True)
    pair = tied_pair(config)
    assert pair == ("model.embed_tokens.weight", "lm_head.weight")
    source = StateSource(reference_model(config))
    (whole,) = cut_model(config, 1, source)
    assert whole.lm.lm_head.weight is whole.lm.model.embed_tokens.weight  # type: ignore[union-attr]
    assert "lm_head.weight" not in whole.full_names().values()
    first, last = cut_model(config, 2, source)
    assert "lm_head.weight" not in first.full_names().values()
    assert last.full_name("lm.lm_head.weight") == "lm_head.weight"
    head = dict(last.named_parameters())["lm.lm_head.weight"]
    assert torch.equal(head, source.state["model.embed_tokens.weight"])


def test_learned_positions_are_only_in_the_first_chunk() -> None:
    config = small_config("opt")
    chunks = [
        build_chunk(config, spec, attention="sdpa", activation_checkpointing=False)
        for spec in plan_cut(config, 3, 16)
    ]
    holders = [
        chunk.spec.index
        for chunk in chunks
        if "model.decoder.embed_positions.weight" in chunk.full_names().values()
    ]
    assert holders == [0]


def test_attention_that_the_type_lacks_is_refused_with_the_mend() -> None:
    from dilocox.models import load_model_config

    small = {k: v for k, v in ARCHITECTURES["qwen3"].items() if k != "model_type"}
    from dilocox.config.run_config import ModelSection

    gemma2 = load_model_config(ModelSection(architecture={"model_type": "gemma2", **small}), 96)
    (spec,) = plan_cut(gemma2, 1, 16)
    with pytest.raises(ModelError, match=r'set model\.attention = "eager"'):
        build_chunk(gemma2, spec, attention="sdpa", activation_checkpointing=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probe_accepts_every_type_that_is_cut_exactly(name: str) -> None:
    state = torch.get_rng_state()
    probe_cut(small_config(name), 3, "sdpa")
    assert torch.equal(torch.get_rng_state(), state)


def test_probe_refuses_a_type_whose_body_does_more_than_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Granite without its adapter scales its input in every chunk, not only in the first.
    monkeypatch.setattr("dilocox.models.chunk._undo_input_scale", lambda body: None)
    config = small_config("granite")
    with pytest.raises(ModelError, match=r"granite.*differ.*site.stages = 1"):
        probe_cut(config, 2, "sdpa")


def test_types_with_parameters_outside_the_plan_are_refused() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("hrm_text")
    with pytest.raises(ModelError, match="no stage would own it"):
        plan_cut(config, 1, 16)


def test_tiny_copy_keeps_the_pattern_and_shrinks_the_rest() -> None:
    from dilocox.models import count_parameters, load_model_config

    big = load_model_config(
        section(
            "gemma3_text",
            hidden_size=2560,
            num_attention_heads=8,
            head_dim=256,
            intermediate_size=10240,
            num_hidden_layers=34,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5
            + ["sliding_attention"] * 4,
            vocab_size=262144,
        ),
        None,
    )
    tiny = tiny_config(big)
    assert tiny.layer_types == big.layer_types[: tiny.num_hidden_layers]
    assert {"sliding_attention", "full_attention"} == set(tiny.layer_types)
    assert tiny.tie_word_embeddings == big.tie_word_embeddings
    assert count_parameters(tiny) < 10_000_000
    assert big.num_hidden_layers == 34


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_lies_before_and_after_the_layers(name: str) -> None:
    config = small_config(name, tie_word_embeddings=False)
    first, middle, last = (
        build_chunk(config, spec, attention="sdpa", activation_checkpointing=False)
        for spec in plan_cut(config, 3, 16)
    )
    assert first.embedding is first.lm.get_input_embeddings()
    assert middle.embedding is last.embedding is None
    assert first.closing == middle.closing == []
    *before, head = last.closing
    assert head is last.lm.get_output_embeddings()
    assert before
    parts = [*before, head, *last.layers]
    held = sum(p.numel() for part in parts for p in part.parameters())
    assert held == sum(p.numel() for p in last.parameters())
