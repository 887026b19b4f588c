"""Plans of runs that train adapters: these alone have gradients, state and payloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.base_model import write_base
from tests.support.planned_runs import device, link, run

from dilocox.config.run_config import RunConfig
from dilocox.inner.pipeline import Computation
from dilocox.models import build_chunk, materialise
from dilocox.models.nf4 import nf4_bytes
from dilocox.tools.planner import activations
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.memory_footprint import footprints
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.plan import plan_run
from dilocox.tools.planner.render import as_json, as_text
from dilocox.tools.planner.step_time import chunk_seconds

RANK = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("planned") / "base")


def config(base: Path, adapters: bool = True, freeze_a: bool = False, **sections: Any) -> RunConfig:
    """A run from `base`, with adapters or without."""
    raw = run(**sections).model_dump(mode="json", exclude_none=True)
    raw["model"] = {"path": str(base)}
    if adapters:
        raw["adapter"] = {"rank": RANK, "freeze_a": freeze_a}
    return RunConfig.model_validate(raw)


def outline(base: Path, **given: Any) -> ModelOutline:
    return ModelOutline.of(config(base, **given))


def test_the_outline_counts_adapters_and_base(base: Path) -> None:
    whole, small = outline(base, adapters=False), outline(base)
    # q, k, v, o: 32 → 32, 16, 16 and back; gate, up, down: 32 ↔ 64; in two layers.
    sides = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 64)
    assert small.parameters == sum(small.stage_parameters) == 2 * RANK * sides
    assert small.frozen == whole.parameters
    assert small.stage_frozen == whole.stage_parameters
    assert whole.frozen == whole.adapter_layer == 0
    assert small.adapter_layer == RANK * sides
    assert small.layer_parameters == whole.layer_parameters


def test_a_frozen_a_counts_as_weights_that_are_only_read(base: Path) -> None:
    both, alone = outline(base), outline(base, freeze_a=True)
    # The outputs of q, k, v, o, gate, up and down, in two layers.
    outputs = 32 + 2 * 16 + 32 + 2 * 64 + 32
    assert alone.parameters == sum(alone.stage_parameters) == 2 * RANK * outputs
    assert alone.frozen + alone.parameters == both.frozen + both.parameters
    assert alone.frozen == sum(alone.stage_frozen)
    assert alone.blueprint.parameters == both.blueprint.parameters
    assert alone.read_layer - both.read_layer == both.adapter_layer - alone.adapter_layer
    codec = {"control": {"adapt": "off"}, "compression": {"codec": "none"}}
    places, links = [GpuPlacement(device(), 1, 1)] * 2, [link(1e6)] * 2
    plans = [
        as_json(plan_run(config(base, freeze_a=only, **codec), places, links, 1e10, methods=()))
        for only in (False, True)
    ]
    sent = [each["prediction"]["payload_bytes"] for each in plans]
    assert sent[1] / sent[0] == pytest.approx(alone.parameters / both.parameters, rel=0.1)
    assert alone.flops_per_token < both.flops_per_token


@pytest.mark.parametrize(
    "layout",
    [{}, {"shards": 2, "gradient_sync": "micro-batch"}, {"stages": 2}, {"stages": 2, "shards": 2}],
)
def test_memory_is_of_adapters_and_a_base_of_two_bytes(base: Path, layout: dict[str, Any]) -> None:
    site = {"batch_size": 8, "micro_batch_size": 1, "precision": "bf16", **layout}
    place = GpuPlacement(device(), 4, 4)
    each = outline(base, site=site)
    for stage, part in enumerate(
        footprints(each.config, each, place, activations.kept(each.config, each))
    ):
        own, frozen = each.stage_parameters[stage], each.stage_frozen[stage]
        shards = each.config.site.shards
        assert (part.parameters, part.frozen) == (own, frozen)
        assert part.weights == 4 * own // shards + 2 * frozen // shards
        assert part.optimizer == 8 * own // shards
        assert part.evaluation == 4 * own // shards
        assert part.gradients <= 4 * own + 4 * own // shards
        # Shards gather the base as well; a rank alone casts its adapters.
        if shards > 1 and each.config.site.stages > 1:
            assert part.copies == 2 * (own + frozen)
        elif shards == 1:
            assert part.copies == 2 * own
        else:
            # Both layers and all gradients of one: as cast, and as summed in fp32.
            assert part.copies == 2 * (own + frozen) + 6 * each.adapter_layer


@pytest.mark.parametrize("shards", [1, 2])
def test_a_base_in_four_bits_needs_half_a_byte_per_weight(base: Path, shards: int) -> None:
    """Every shard holds all weights in four bits, and gathers none of them."""
    pytest.importorskip("bitsandbytes")
    site = {"precision": "bf16", "stages": 2, "shards": shards}
    plans = []
    for kept in ("full", "nf4"):
        raw = config(base, site=site).model_dump(mode="json", exclude_none=True)
        raw["adapter"]["base"] = kept
        each = ModelOutline.of(RunConfig.model_validate(raw))
        found = activations.kept(each.config, each)
        assert found.exact
        place = GpuPlacement(device(), 2, 2)
        plans.append((found, footprints(each.config, each, place, found)))
    (whole, of_whole), (packed, of_packed) = plans
    # The weights of q, k, v, o, gate, up and down, of one layer in each stage.
    weights = 32 * (32 + 2 * 16 + 32 + 3 * 64)
    for one, other in zip(of_whole, of_packed, strict=True):
        assert one.weights - other.weights == 2 * weights // shards - nf4_bytes(weights)
        assert one.frozen == other.frozen
        # One weight is dequantised at a time.
        gathered = 2 * weights if shards > 1 else 0
        assert other.copies - one.copies == 2 * 32 * 64 - gathered
    assert packed.layer == whole.layer


def test_activations_are_those_of_real_tensors(base: Path) -> None:
    each = outline(base, site={"precision": "bf16"}, data={"sequence_length": 15})
    found = activations.kept(each.config, each)
    assert found.exact
    (spec,) = each.blueprint.cut
    chunk = build_chunk(
        each.hf_config,
        spec.__class__(1, 3, 1, 2, embeds=False, head=False, parameters=0),
        attention="sdpa",
        activation_checkpointing=False,
        dtype=torch.bfloat16,
        adapter=each.blueprint.adapter,
    )
    materialise(chunk, each.blueprint.weights(each.config), "cpu")
    Computation(torch.bfloat16, sharded=False).prepare(chunk)
    own = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    x = torch.randn(2, 15, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk(x).sum()
    assert found.layer == sum(saved.values())


def test_a_step_has_no_gradients_of_the_base(base: Path) -> None:
    whole, small = outline(base, adapters=False), outline(base)
    (forward,), (backward,) = chunk_seconds(whole.config, whole, 1e12, 100)
    (own_forward,), (own_backward,) = chunk_seconds(small.config, small, 1e12, 100)
    adapters = 2 * small.parameters * 100 / 1e12
    assert own_forward == pytest.approx(forward + adapters)
    assert own_backward == pytest.approx(forward + 2 * adapters)
    assert backward == pytest.approx(2 * forward)
    assert small.flops_per_token == pytest.approx((own_forward + own_backward) * 1e12 / 100)


def test_a_plan_says_both_and_sends_adapters(base: Path) -> None:
    places, links = [GpuPlacement(device(), 1, 1)] * 2, [link(1e6)] * 2
    codec = {"control": {"adapt": "off"}, "compression": {"codec": "none"}}
    found = [
        plan_run(config(base, adapters, **codec), places, links, 1e10, methods=())
        for adapters in (True, False)
    ]
    small, whole = map(as_json, found)
    assert small["model"]["frozen"] == whole["model"]["parameters"]
    assert "frozen" not in whole["model"]
    assert "parameters of adapters on" in as_text(found[0])
    assert "adapters" not in as_text(found[1])
    ratio = small["model"]["parameters"] / whole["model"]["parameters"]
    sent = [each["prediction"]["payload_bytes"] for each in (small, whole)]
    assert sent[0] / sent[1] == pytest.approx(ratio, rel=0.1)
