"""A frozen base in NF4: its size, its values, and the product that adapters are trained on."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from dilocox.config.adapter import AdapterSection
from dilocox.errors import ConfigError, ModelError
from dilocox.models import ModelChunk, build_chunk, materialise, partition, plan_cut
from dilocox.models import nf4 as tested
from dilocox.models.adapter_weights import AdapterWeights
from dilocox.models.nf4 import (
    BLOCK,
    Nf4Linear,
    check_bitsandbytes,
    dequantised,
    nf4_bytes,
    quantised,
)
from tests.support.architectures import StateSource, reference_model, run, small_config, token_ids
from tests.support.skips import need

need("bitsandbytes")

LORA = AdapterSection(rank=3, base="nf4")


def filled(config: Any, chunks: int, reference: nn.Module) -> list[ModelChunk]:
    source = AdapterWeights(config, LORA, 1, StateSource(reference))
    made = []
    for spec in plan_cut(config, chunks, 16, LORA):
        chunk = build_chunk(
            config, spec, attention="sdpa", activation_checkpointing=False, adapter=LORA
        )
        held = [module for module in chunk.modules() if isinstance(module, Nf4Linear)]
        assert spec.packed == sum(each.in_features * each.out_features for each in held)
        materialise(chunk, source, "cpu")
        made.append(chunk.eval())
    return made


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "opt-projected")),
    ],
)
def test_the_model_computes_with_dequantised_weights(name: str) -> None:
    config, ids = small_config(name), token_ids()
    reference = reference_model(config)
    chunks = filled(config, 2, reference)
    plain = reference(ids).logits
    # The same model, whose weights are rounded to the values of NF4.
    rounded = reference.state_dict()
    layers = {
        chunk.full_name(f"{path}.packed"): module
        for chunk in chunks
        for path, module in chunk.named_modules()
        if isinstance(module, Nf4Linear)
    }
    assert layers.keys() <= rounded.keys()
    assert not any("lm_head" in full or "embed" in full for full in layers)
    for full, module in layers.items():
        weight = module.weight(torch.float32)
        off = (weight - rounded[full]).norm() / rounded[full].norm()
        assert 0.05 < off < 0.12
        rounded[full].copy_(weight)
    logits = run(chunks, ids)
    assert torch.allclose(reference(ids).logits, logits, atol=1e-5)
    assert not torch.allclose(plain, logits, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_the_input_and_nothing_is_kept_for_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 7, dtype=dtype).requires_grad_(False)
    layer = Nf4Linear(linear)
    with pytest.raises(ModelError, match="no weight yet"):
        layer(torch.zeros(1, 96, dtype=dtype))
    layer.fill(linear.weight.float())
    x = torch.randn(3, 5, 96, dtype=dtype, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each), lambda _: None):
        y = layer(x)
    assert saved == []
    y.float().square().sum().backward()
    twin = x.detach().requires_grad_()
    other = nn.functional.linear(twin, layer.weight(dtype)) + linear.bias
    other.float().square().sum().backward()
    assert torch.equal(y, other)
    assert twin.grad is not None
    assert x.grad is not None
    assert torch.allclose(x.grad, twin.grad, rtol=1e-2)
    # A gate tries contributions in an fp32 copy.
    assert torch.equal(copy.deepcopy(layer).float().weight(dtype), layer.weight(dtype))


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (64, 576), (7, 130), (3, 21)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_is_the_nearest_of_sixteen(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Whatever the length of a row: also where the package's own kernel is wrong."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    packed, scales = quantised(weight)
    assert nf4_bytes(weight.numel()) == sum(
        each.nbytes for each in (packed, scales.absmax, scales.state2.absmax)
    )
    found = dequantised(packed, scales, shape).float().reshape(-1)
    values, code = weight.float().reshape(-1), scales.code
    rounding = 2**-7 if dtype is torch.bfloat16 else 1e-6
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        largest = block.abs().max()
        nearest = code[(block[:, None] / largest - code).abs().argmin(1)] * largest
        # Scales are kept in eight bits.
        off = (found[start : start + BLOCK] - nearest).abs().max() / largest
        assert off < 0.05 + rounding


def test_what_cannot_be_kept_in_four_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        # A model type may have linear layers of a class of its own.
        patched.setattr(partition, "linear_layers", lambda _: [])
        with pytest.raises(ConfigError, match=r"layer 0 of Qwen3\w+ has no layer of torch\.nn"):
            plan_cut(small_config("qwen3"), 1, 16, LORA)
    check_bitsandbytes()
    monkeypatch.setattr(tested, "quantised", lambda _: 1 / 0)
    with pytest.raises(ConfigError, match="does not work here"):
        check_bitsandbytes()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'dilocox\[nf4\]'"):
        check_bitsandbytes()
