"""What is counted on fake tensors is what real tensors keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.planned_runs import run
from tests.support.process_starts import ARCHITECTURE

from dilocox.inner.memory import activation_bytes
from dilocox.inner.pipeline import Computation
from dilocox.models import build_chunk, materialise, open_weights, plan_cut
from dilocox.tools.planner import activations
from dilocox.tools.planner.memory_footprint import counted
from dilocox.tools.planner.model_outline import ModelOutline

CAPPED = {**ARCHITECTURE, "model_type": "gemma3_text", "vocab_size": 1024}


def really_saved(config: Any, bf16: bool) -> int:
    """Bytes that autograd saves of one layer with real values, parameters left out."""
    outline = ModelOutline.of(config)
    (spec,) = [c for c in plan_cut(outline.hf_config, 4, 16) if c.index == 2]
    chunk = build_chunk(outline.hf_config, spec, attention="sdpa", activation_checkpointing=False)
    materialise(chunk, open_weights(config.model, outline.hf_config, 0), "cpu")
    Computation(torch.bfloat16 if bf16 else torch.float32, sharded=False).prepare(chunk)
    chunk.train()
    own = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    # 30 tokens: no activation has the shape of a matrix.
    rows, length = config.site.micro_batch_size, config.data.sequence_length
    x = torch.randn(rows, length, 32, dtype=chunk.layers[0].input_layernorm.weight.dtype)  # type: ignore[union-attr, arg-type]
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        packed = config.data.rows.packing == "documents"
        positions = torch.arange(length).remainder(7).expand(rows, length)
        chunk(x, None, positions if packed else None).sum()
    return sum(found.values())


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_layers_activations_are_those_of_real_tensors(precision: str, packing: str) -> None:
    data = {"sequence_length": 15, "tokenizer": "given", "packing": packing}
    config = run(site={"precision": precision}, data=data)
    found = activations.kept(config, ModelOutline.of(config))
    assert found.exact
    assert found.layer == really_saved(config, precision == "bf16")
    assert found.entry == 2 * 15 * 32 * (2 if precision == "bf16" else 4)


def test_the_mask_of_packed_rows_grows_with_the_square_of_their_length() -> None:
    found = {}
    for packing in ("stream", "documents"):
        data = {"sequence_length": 64, "tokenizer": "given", "packing": packing}
        config = run(site={"precision": "bf16"}, data=data)
        found[packing] = activations.kept(config, ModelOutline.of(config))
    mask = config.site.micro_batch_size * 64 * 64
    more = found["documents"].layer - found["stream"].layer
    # As truth values, and as numbers that are added to scores; the positions are small.
    assert 3 * mask <= more < 3.5 * mask
    assert found["documents"].head == found["stream"].head


def test_the_head_needs_its_logits_three_times_and_its_inputs() -> None:
    config = run(site={"precision": "fp32"})
    found = activations.kept(config, ModelOutline.of(config))
    logits = 2 * 16 * 128 * 4
    # Beside what the loss needs: the norm's input, its square's mean, and the head's input.
    assert 3 * logits < found.head < 4 * logits


@pytest.mark.parametrize(("precision", "logit"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("device", "chunk"), [("cpu", 2**25), ("cuda", 2**27)])
def test_of_many_logits_those_of_a_chunk_count(
    precision: str, logit: int, device: str, chunk: int
) -> None:
    site = {"precision": precision, "batch_size": 16384, "micro_batch_size": 16384}
    config = run(
        site={**site, "device": device}, data={"sequence_length": 64, "tokenizer": "given"}
    )
    found = activations.kept(config, ModelOutline.of(config))
    tokens = 16384 * 64
    assert found.head > chunk * 2 * logit
    # ... in fp32, too, and what norm and head save, less than 18 bytes of 32 values for each token.
    rest = found.head - chunk * (logit + (4 if logit == 4 else 8))
    assert 0 < rest < tokens * 32 * 18


def test_a_soft_cap_keeps_logits_of_a_chunk_alone() -> None:
    """Autograd saves the cap's output, of no more tokens than have logits at a time."""
    site = {"batch_size": 16384, "micro_batch_size": 16384, "device": "cuda"}
    model = {"architecture": {**CAPPED, "final_logit_softcapping": 30.0}}
    plain = {"architecture": {**CAPPED, "final_logit_softcapping": None}}
    data = {"sequence_length": 64, "tokenizer": "given"}
    capped, without = (
        activations.kept(config, ModelOutline.of(config)).head
        for config in (run(site=site, data=data, model=each) for each in (model, plain))
    )
    chunk = 2**27 * 2  # bytes of bf16
    assert 0.9 * chunk < capped - without <= chunk


def test_a_loss_that_reads_columns_gets_all_logits() -> None:
    rows, length = 2**19, 16
    data = {"sequence_length": length, "tokenizer": "given"}
    site = {"batch_size": rows, "micro_batch_size": rows, "device": "cuda"}
    plain = run(site=site, data=data)
    outline = ModelOutline.of(plain)
    weighted = run(site=site, data={**data, "format": "jsonl", "columns": ["weight"]})
    pairs = plain.model_copy(
        update={"data": plain.data.model_copy(update={"format": "preference"})}
    )
    logits = 2 * rows * length * 128  # bytes in bf16
    heads = [counted(config, outline).head for config in (plain, weighted, pairs)]
    assert heads[0] < heads[1]
    assert heads[1] > 2 * logits
    # Beside logits and their gradient: fp32 forms of some logits.
    assert heads[2] - heads[1] == 3 * 4 * 2**24
    long = 256
    data |= {"sequence_length": long}
    few = run(site=site | {"batch_size": 512, "micro_batch_size": 512}, data=data)
    few = few.model_copy(update={"data": few.data.model_copy(update={"format": "preference"})})
    # Few logits per token: the signs of pairs in the forward pass are the most.
    assert counted(few, outline).head > 2 * 512 * long * 128 + 3 * 4 * 512 * (long // 2) * long


@pytest.mark.parametrize("schedule", ["interleaved-zero-bubble", "zbv"])
def test_schedules_that_cannot_join_head_and_loss_hold_all_logits(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass in two halves goes through a function from PyTorch 2.13 on alone."""
    rows = 16384
    site = {"stages": 2, "chunks": 2, "batch_size": 4 * rows, "micro_batch_size": rows}
    data = {"sequence_length": 64, "tokenizer": "given"}
    model = {"architecture": {**CAPPED, "final_logit_softcapping": 30.0}}
    config = run(site={**site, "schedule": schedule, "device": "cuda"}, data=data, model=model)
    outline = ModelOutline.of(config)
    heads, bounds = [], []
    for joins in (True, False):
        monkeypatch.setattr("dilocox.inner.pipeline.weight_half_takes_functions", lambda j=joins: j)
        found = counted(config, outline)
        assert found.exact
        heads.append(found.head)
        bounds.append(activation_bytes(config, outline.hf_config, 1, 2, True, 2))
    logits = rows * 64 * 1024 * 2
    # Logits and their gradient, 192 MiB of fp32; and the soft cap's output, of all tokens.
    assert heads[1] >= 3 * logits
    assert 2 * logits + 12 * 2**24 <= bounds[1] < heads[1]
    assert heads[0] < 1.5 * logits
    assert bounds[0] < bounds[1]
    # No other schedule hangs on it.
    plain = {**site, "stages": 1, "chunks": 1, "device": "cuda"}
    whole = run(site=plain, data=data, model=model)
    assert counted(whole, outline).head == heads[0]


def test_more_tokens_keep_more_and_the_bound_is_below() -> None:
    found = [
        activations.kept(config, ModelOutline.of(config)).layer
        for config in (run(), run(site={"micro_batch_size": 4}))
    ]
    assert found[1] == pytest.approx(2 * found[0], rel=0.1)
    bound = activation_bytes(run(), ModelOutline.of(run()).hf_config, 0, 1, False, 2)
    assert bound < found[0]


def test_a_model_that_cannot_run_on_fake_tensors_has_a_lower_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(activations, "_saved", refuses)
    outline = ModelOutline.of(run())
    found = activations.kept(run(), outline)
    assert not found.exact
    assert found.layer == activation_bytes(run(), outline.hf_config, 0, 1, False, 2)
    assert found.selected == 2 * found.entry
    assert found.head > 0
    # Of one micro-batch, whatever the pipeline: how many are in flight is counted elsewhere.
    deep = {"stages": 4, "batch_size": 16, "micro_batch_size": 1}
    one = run(site={"batch_size": 16, "micro_batch_size": 1})
    expected = activations.kept(one, outline)
    for schedule in ("1f1b", "gpipe"):
        assert activations.kept(run(site={**deep, "schedule": schedule}), outline) == expected
    checkpointed = run(site=one.site.model_dump(), model={"activation_checkpointing": True})
    assert activations.kept(checkpointed, outline) == expected


def test_selective_checkpointing_keeps_a_part_of_a_layer() -> None:
    config = run(site={"precision": "fp32"}, model={"attention": "sdpa"})
    found = activations.kept(config, ModelOutline.of(config))
    tokens = 2 * 16
    # The outputs of q, v, the attention, gate and down; k, o and up are computed again.
    products = 32 + 16 + 32 + 64 + 32
    logarithms = 4 * 4 * tokens  # of the attention's sums, one for each head
    assert found.selected == found.entry + 4 * tokens * products + logarithms
    assert found.entry < found.selected < found.layer
