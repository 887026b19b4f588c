"""Experts compute in the precision that was asked for, in one process and without a group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dilocox.config.run_config import ModelSection
from dilocox.inner.pipeline import Computation
from dilocox.models import (
    ModelChunk,
    build_chunk,
    load_model_config,
    materialise,
    open_weights,
    plan_cut,
)
from dilocox.tools.planner import activations
from dilocox.tools.planner.model_outline import ModelOutline
from tests.support.architectures import (
    ARCHITECTURES,
    ROUTED_IN_FP32,
    VOCABULARY,
    section,
    small_config,
    token_ids,
)
from tests.support.planned_runs import run

pytestmark = pytest.mark.waits

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def model(checkpointing: bool = False) -> ModelChunk:
    config = small_config("qwen3_moe")
    (spec,) = plan_cut(config, 1, 12)
    chunk = build_chunk(config, spec, attention="sdpa", activation_checkpointing=checkpointing)
    materialise(chunk, open_weights(section("qwen3_moe"), config, 0), CPU)
    return chunk.train()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """(dtype, storage) of the experts in every grouped product."""
    found: list[tuple[torch.dtype, int]] = []
    plain = F.grouped_mm

    def noted(mine: Any, experts: Any, **options: Any) -> Any:
        assert mine.dtype == experts.dtype
        found.append((experts.dtype, experts.untyped_storage().data_ptr()))
        return plain(mine, experts, **options)

    monkeypatch.setattr(F, "grouped_mm", noted)
    return found


def gradients(chunk: ModelChunk, computation: Computation, micros: int = 2) -> dict[str, Any]:
    """Of what is trained, by name; they are not kept there."""
    with computation.step():
        for number in range(micros):
            logits = chunk(token_ids(seed=number))
            F.cross_entropy(logits.flatten(0, 1).float(), token_ids(seed=9).flatten()).backward()
    found = {}
    for name, parameter in chunk.named_parameters():
        trained = computation.trained(chunk, parameter)
        found[name], trained.grad = trained.grad, None
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_are_multiplied_as_their_bf16_copies(
    checkpointing: bool, products: list[tuple[torch.dtype, int]]
) -> None:
    chunk = model(checkpointing)
    parameters = dict(chunk.named_parameters())
    expected = gradients(chunk, Computation(torch.float32, sharded=False))
    assert {dtype for dtype, _ in products} == {torch.float32}
    products.clear()
    computation = Computation(BF16, sharded=False)
    computation.prepare(chunk)
    found = gradients(chunk, computation)
    assert {dtype for dtype, _ in products} == {BF16}
    # Four layers of two products; the second micro-batch and recomputation use the same copies.
    assert len({storage for _, storage in products}) == 8
    assert len(products) == 8 * 2 * (1 + checkpointing)
    for name, parameter in chunk.named_parameters():
        assert computation.trained(chunk, parameter) is parameters[name]
        assert (parameter.dtype, parameters[name].dtype) == (BF16, torch.float32)
        assert parameter.grad is None
        assert found[name].dtype == torch.float32
        # Near, as far as rounding sends no token to another expert.
        norm = expected[name].norm()
        assert (found[name] - expected[name]).norm() <= 0.5 * norm + 1e-4, name
    # The next step sees what the optimizer did.
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    assert not any(each.any() for each in gradients(chunk, computation).values() if each.dim() == 3)


def test_routers_that_a_type_keeps_in_fp32_have_no_copies() -> None:
    section = ModelSection(architecture=ROUTED_IN_FP32)
    config = load_model_config(section, VOCABULARY)
    (spec,) = plan_cut(config, 1, 12)
    chunk = build_chunk(config, spec, attention="sdpa", activation_checkpointing=False)
    materialise(chunk, open_weights(section, config, 0), CPU)
    parameters = dict(chunk.train().named_parameters())
    computation = Computation(BF16, sharded=False)
    computation.prepare(chunk)
    found = gradients(chunk, computation)
    kept = {name for name, parameter in chunk.named_parameters() if parameter.dtype != BF16}
    gates = {f"lm.model.layers.{layer}.mlp.gate.weight" for layer in (1, 2)}
    biases = {
        f"lm.model.layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias" for layer in (1, 2)
    }
    assert kept == gates | biases == set(chunk.kept_in_fp32)
    for name, parameter in chunk.named_parameters():
        assert computation.trained(chunk, parameter) is parameters[name]
        assert (parameter is parameters[name]) == (name in kept)
        assert (found[name] is None) == (name in biases)
    assert all(found[name].dtype == torch.float32 and found[name].any() for name in gates)


def test_in_fp32_and_under_fsdp_nothing_is_copied() -> None:
    for computation in (
        Computation(torch.float32, sharded=False),
        Computation(BF16, sharded=True),
    ):
        chunk = model()
        parameters = dict(chunk.named_parameters())
        computation.prepare(chunk)
        for name, parameter in chunk.named_parameters():
            assert parameter is parameters[name] is computation.trained(chunk, parameter)


def test_a_copy_has_experts_of_its_own(products: list[tuple[torch.dtype, int]]) -> None:
    """A gate tries contributions in a copy, in fp32."""
    chunk = model()
    Computation(BF16, sharded=False).prepare(chunk)
    copied = copy.deepcopy(chunk).float().eval()
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.zero_()
        copied(token_ids())
    own = {p.untyped_storage().data_ptr() for p in copied.parameters() if p.dim() == 3}
    assert {storage for _, storage in products} == own
    assert {dtype for dtype, _ in products} == {torch.float32}


@pytest.mark.slow
def test_compiled_layers_with_experts() -> None:
    chunk = model()
    computation = Computation(BF16, sharded=False)
    computation.prepare(chunk)
    expected = gradients(chunk, computation)
    for layer in chunk.layers:
        layer.compile(backend="aot_eager")
    found = gradients(chunk, computation)
    found = gradients(chunk, computation)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0.05, atol=1e-3)


def test_the_planner_counts_what_the_experts_keep() -> None:
    architecture = {**ARCHITECTURES["qwen3_moe"], "vocab_size": 96}
    tokens = [activations.kept(each, ModelOutline.of(each)) for each in (
        run(model={"architecture": architecture}, site={"micro_batch_size": rows})
        for rows in (1, 2, 4)
    )]  # fmt: skip
    # PyTorch's own figures for products without memory know bf16 alone.
    assert all(each.exact for each in tokens)
    # No cast of the experts is in it, which would be the same for any number of tokens.
    more = [tokens[1].layer - tokens[0].layer, tokens[2].layer - tokens[1].layer]
    assert more[1] == pytest.approx(2 * more[0], rel=0.05)
    assert tokens[0].layer == pytest.approx(more[0], rel=0.05)


def test_the_planner_counts_what_the_load_balancing_loss_keeps() -> None:
    architecture = {**ARCHITECTURES["qwen3_moe"], "vocab_size": 96}
    plain, balanced = (
        activations.kept(each, ModelOutline.of(each))
        for each in (
            run(model={"architecture": {**architecture, "output_router_logits": asked}})
            for asked in (False, True)
        )
    )
    assert balanced.exact
    assert balanced.head > plain.head
    assert balanced.layer == plain.layer
