"""Memory of a rank, part by part, against figures worked by hand; and what is advised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.planned_runs import ARCHITECTURE, EMBEDDING, LAYER, device, run

from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.choice import as_the_run_file_says
from dilocox.tools.planner.activations import Kept
from dilocox.tools.planner.advice import advice
from dilocox.tools.planner.hardware_table import Device, GpuPlacement
from dilocox.tools.planner.host_memory import host_memory, machine_bytes
from dilocox.tools.planner.memory_footprint import Footprint, counted, footprints, needed
from dilocox.tools.planner.model_outline import ModelOutline

EACH = Kept(layer=200_000, entry=90_000, selected=120_000, head=500_000, exact=True)
L, E, H = EACH.layer, EACH.entry, EACH.head


def of(config: RunConfig, place: GpuPlacement | None = None) -> list[Footprint]:
    return footprints(config, ModelOutline.of(config), place or GpuPlacement(device(), 8, 1), EACH)


def test_one_rank_by_hand() -> None:
    # AdamW: 4 bytes each of parameter, gradient and two moments; bf16 casts of all parameters.
    (found,) = of(run())
    whole = 4 * LAYER + 2 * EMBEDDING + 32
    assert found.parameters == whole
    assert (found.weights, found.gradients, found.optimizer) == (4 * whole, 4 * whole, 8 * whole)
    assert found.copies == 2 * whole
    # Four layers of the one micro-batch at a time, and the head of one.
    assert found.activations == 4 * L + H
    # dilocox: anchor, momentum, reference, residual, 16; a quarter of the model lands, 8 / 4.
    assert found.outer == 18 * whole
    assert not found.outer_on_device
    assert found.device == 18 * whole + 4 * L + H
    # A quarter waits for its landing: contribution, what was seen of it, average. Of one more the
    # int4 payloads of two sites are there, and one site's values.
    assert found.under_way == round((12 + 4 + 2 * 0.52) / 4 * whole)
    # A checkpoint copies parameters, moments, outer state and the contributions that wait; staging
    # buffers hold a quarter of the model each way.
    assert found.snapshot == (4 + 8 + 16 + 4 / 4) * whole
    assert found.staging == 2 * 4 / 4 * whole
    assert found.record_copy == found.published == found.gathered == 0
    # At the end of a run all four quarters are exchanged at once, in eight bits. Two of them run.
    last = (12 + 2 * (4 + 2 * 1.02) / 4) * whole
    assert found.under_way + found.flush == pytest.approx(last, abs=1)
    assert found.host == (
        found.outer + found.under_way + found.flush + found.snapshot + found.staging
    )
    # The copy of an evaluation is no more than the gradients that are gone by then.
    assert found.evaluation == found.gradients == 4 * whole


def test_optimizers_and_where_the_outer_state_is() -> None:
    whole = 4 * LAYER + 2 * EMBEDDING + 32
    (muon,) = of(run(inner={"optimizer": "muon"}))
    # One momentum of the layers' matrices; two moments of AdamW of embedding, head and norms.
    others = 2 * EMBEDDING + 32 + 4 * 2 * 32
    assert muon.optimizer == 4 * (whole - others) + 8 * others
    (plain,) = of(run(inner={"optimizer": "sgd"}, site={"precision": "fp32"}))
    assert plain.optimizer == plain.copies == 0
    (inside,) = of(run(outer={"device": "model"}))
    # Exchanges have their values on the GPU; their payloads pass the machine's memory. A landing
    # comes when gradients and activations are gone, which are more.
    assert inside.exchanges == round((12 + 4 + 2 * 0.52) / 4 * whole)
    assert inside.device == 18 * whole + 4 * L + H + 16 * whole + inside.exchanges
    # The last exchanges have the largest payloads: two of a quarter each, in eight bits.
    assert inside.under_way == round(2 * 2 * 1.02 / 4 * whole)
    # The values of the last exchanges are less than gradients and activations.
    assert inside.flush == round((12 * 3 / 4 + 4 / 4) * whole)
    # The anchor comes from the GPU to be published, where exchanges have ended. The copy of anchor
    # and momentum for a site that enters is larger, and comes before there are any.
    assert (inside.published, inside.donated) == (4 * whole, 8 * whole)
    assert inside.host == inside.snapshot + inside.staging + inside.donated
    (narrow,) = of(run(outer={"device": "model", "momentum_dtype": "bf16"}))
    assert inside.device - narrow.device == 2 * whole
    assert narrow.donated == 6 * whole
    (alone,) = of(run(sites={"lyon": {}}))
    assert alone.donated == 0
    (dense,) = of(run(outer={"method": "diloco"}))
    # No residual, but all of the model at once, as it is.
    assert dense.outer == (12 + 8) * whole
    assert dense.under_way == (12 + 4 + 2 * 4) * whole
    assert dense.flush == 0


def test_a_landing_on_the_gpu_may_take_more_than_a_step() -> None:
    """It is one of the whole model, in one block, where little else is held."""
    small = Kept(layer=10, entry=1, selected=2, head=20, exact=True)
    config = run(
        outer={"method": "diloco", "device": "model"},
        site={"precision": "fp32", "micro_batch_size": 8},
    )
    (found,) = footprints(config, ModelOutline.of(config), GpuPlacement(device(), 8, 1), small)
    whole = found.parameters
    assert found.landing == found.peak == 16 * whole
    assert found.device == (4 + 8 + 12) * whole + found.exchanges + 16 * whole
    assert found.exchanges == (12 + 4 + 2 * 4) * whole


def test_states_for_the_record_are_a_second_copy() -> None:
    (plain,) = of(run())
    (recorded,) = of(run(record={"states_every": 2}))
    assert recorded.record_copy == recorded.snapshot == plain.snapshot
    assert recorded.host - plain.host == recorded.record_copy
    (processors,) = of(run(record={"states_every": 2}), GpuPlacement(device(shared=True), 1, 1))
    assert processors.staging == processors.host == 0
    (without,) = of(run(), GpuPlacement(device(shared=True), 1, 1))
    assert processors.device - without.device == processors.record_copy


@pytest.mark.parametrize(("dtype", "start"), [("fp32", 8), ("bf16", 6)])
def test_a_bounded_record_copies_the_anchor(dtype: str, start: int) -> None:
    outer = {"momentum_dtype": dtype}
    (plain,), (bounded,) = (
        of(run(outer=outer, record=record)) for record in ({}, {"keep": 20, "states_every": 0})
    )
    assert plain.window_copy == 0
    assert bounded.window_copy == start * plain.parameters
    # Payloads wait for their landing, too: of the flush, two quarters beside those that run.
    held = 2 * 2 * 1.02 / 4 * plain.parameters
    assert bounded.host - plain.host - bounded.window_copy == pytest.approx(held, abs=1)
    place = GpuPlacement(device(shared=True), 1, 1)
    (plain,), (bounded,) = (
        of(run(outer=outer, record=record), place) for record in ({}, {"keep": 20})
    )
    assert bounded.device - plain.device == bounded.window_copy > 0
    (off,) = of(run(outer=outer, record={"keep": 20, "enabled": False}), place)
    assert off.window_copy == 0


def test_slopes_are_measured_beside_what_is_trained() -> None:
    """A gate of several ranks takes gradients at other points than the rank's own."""
    site = {"stages": 2, "batch_size": 8}
    (plain, _), (gate, _) = (
        of(run(site=site, admission=admission))
        for admission in ({}, {"aggregation": "clip", "gate": True})
    )
    assert gate.copies - plain.copies == 4 * plain.parameters + plain.parameters
    assert gate.lasting == plain.lasting


def test_the_machine_that_holds_what_gpus_do_not() -> None:
    config = run(site={"stages": 2, "shards": 2, "batch_size": 8, "micro_batch_size": 1})
    stages = of(config)
    first, last = stages
    # Shards gather tensors whole on the GPU, and the first of them the stage in memory.
    assert first.gathered == 4 * EMBEDDING
    assert first.published == 4 * first.parameters
    assert last.parameters > first.parameters
    found = host_memory([(GpuPlacement(device(), 4, 1), stages)], config)
    assert found is not None
    assert (found.ranks, found.available) == (4, None)
    exchanges = last.under_way + last.flush
    assert found.needed == 4 * last.host_lasting + max(4 * exchanges, 2 * last.published)
    # Of three ranks side by side two may be a stage's first.
    assert machine_bytes(stages, 3, 2) == 3 * last.host_lasting + max(
        3 * exchanges, 2 * last.published
    )
    assert host_memory([(GpuPlacement(device(shared=True), 1, 1), stages)], config) is None


def test_shards_in_a_pipeline_gather_parameters_and_sum_whole_gradients() -> None:
    config = run(site={"stages": 2, "shards": 2, "batch_size": 8, "micro_batch_size": 1})
    first, last = of(config)
    parameters = 2 * LAYER + EMBEDDING
    assert first.parameters == parameters
    assert first.weights == 4 * parameters // 2
    assert first.optimizer == 8 * parameters // 2
    assert first.copies == 2 * parameters
    assert first.gradients == 4 * parameters + 4 * parameters // 2
    # 1F1B: the first of two stages holds two micro-batches of its two layers.
    # Their outputs are kept, too, and a gradient is on its way.
    assert first.activations == 2 * 2 * L + 2 * E + E
    assert last.activations == 2 * L + H + E


def test_shards_of_one_stage_gather_two_layers_at_a_time() -> None:
    site = {"shards": 4, "micro_batch_size": 2, "gradient_sync": "micro-batch"}
    (found,) = of(run(site=site))
    whole = 4 * LAYER + 2 * EMBEDDING + 32
    assert found.weights == 4 * (whole // 4)
    # Two layers in bf16 and a gradient of one, one layer's in fp32 to be reduced. Norm and head are
    # through by then, the embedding is gathered in the forward pass alone.
    assert LAYER > EMBEDDING + 32
    assert found.copies == 2 * 2 * LAYER + 2 * LAYER + 4 * LAYER


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_is_gathered_throughout(tied: bool) -> None:
    """It is no unit of its own then (dilocox.inner.fsdp.Units); else the head's unit counts."""
    shape = {**ARCHITECTURE, "vocab_size": 4096, "tie_word_embeddings": tied}
    site = {"shards": 4, "micro_batch_size": 2, "gradient_sync": "micro-batch"}
    (found,) = of(run(site=site, model={"architecture": shape}))
    words, norm = 4096 * 32, 32
    if tied:
        outside = words + norm
        assert found.copies == 2 * (2 * LAYER + outside) + 2 * (LAYER + outside) + 4 * LAYER
    else:
        # The head with its gradient, in bf16 and in fp32 to be reduced, and the last layer.
        closing = words + norm
        assert found.copies == 2 * (2 * closing + LAYER) + 4 * closing


def test_shards_of_one_stage_hold_it_whole_where_they_reduce_once_per_step() -> None:
    whole = 4 * LAYER + 2 * EMBEDDING + 32
    site = {"shards": 4, "micro_batch_size": 2}
    (asked,) = of(run(site={**site, "gradient_sync": "step"}))
    assert asked.copies == 2 * whole
    assert asked.gradients == 4 * whole + 4 * (whole // 4)
    (found,) = of(run(site=site))
    assert found == asked, "there is room enough"
    config = run(site={**site, "gradient_sync": "step"})
    outline = ModelOutline.of(config)
    place = GpuPlacement(
        device(memory=needed([asked], GpuPlacement(device(), 8, 1), config) - 1), 8, 1
    )
    changes = [dict(each.values) for each in advice(config, outline, place, place.gpus)]
    assert changes[0] == {"site.gradient_sync": "micro-batch"}


def test_checkpointing_keeps_entries_and_one_layer() -> None:
    config = run(
        model={"activation_checkpointing": True},
        site={"stages": 2, "batch_size": 8, "micro_batch_size": 1},
    )
    first, last = of(config)
    assert first.activations == 2 * 2 * E + L + 2 * E + E
    assert last.activations == 2 * E + L + H + E


def test_selective_checkpointing_keeps_what_was_selected_and_one_layer() -> None:
    config = run(
        model={"activation_checkpointing": "selective"},
        site={"stages": 2, "batch_size": 8, "micro_batch_size": 1},
    )
    first, _ = of(config)
    assert first.activations == 2 * 2 * EACH.selected + L + 2 * E + E


def test_the_newest_bf16_gradient_counts_where_little_else_is_held() -> None:
    """It is there beside its master's, of one parameter after the other."""
    small = Kept(layer=10, entry=1, selected=2, head=20, exact=True)
    place, config = GpuPlacement(device(), 8, 1), run()

    def activations(config: RunConfig) -> int:
        (found,) = footprints(config, ModelOutline.of(config), place, small)
        return found.activations

    assert activations(config) == 2 * EMBEDDING
    assert activations(run(site={"precision": "fp32"})) == 4 * 10 + 20
    assert activations(run(site={"shards": 4, "micro_batch_size": 2})) == 4 * 10 + 20


def test_gpipe_holds_the_logits_of_all_micro_batches() -> None:
    """Forward passes and losses of all come before the first backward pass."""
    site = {"stages": 2, "schedule": "gpipe", "batch_size": 6, "micro_batch_size": 1}
    _, last = of(run(site=site))
    assert last.activations == 6 * 2 * L + E + H + 5 * H * 2 // 3


def test_the_later_it_lands_the_more_is_under_way() -> None:
    config = run()
    outline, place = ModelOutline.of(config), GpuPlacement(device(), 8, 1)
    rounds = as_the_run_file_says(config)
    assert (rounds.fragments, rounds.slots) == (4, 20)
    # Two exchanges run at most, and have two sites' payloads and one site's values each.
    for delay, waiting, running in ((1, 1, 1), (5, 1, 1), (6, 2, 2), (20, 4, 2)):
        (found,) = footprints(config, outline, place, EACH, replace(rounds, delay=delay))
        bytes_each = 12 * waiting / 4 + running * (4 + 2 * 0.52) / 4
        assert found.under_way == round(bytes_each * found.parameters)


EIGHT = {f"s{number}": {} for number in range(8)}


@pytest.mark.parametrize(
    ("sections", "payloads", "last"),
    [
        # One site's payload of a quarter takes `width` / 4. Eight are held while an exchange runs.
        ({}, 2 * 8 * 0.52 / 4, 2 * 8 * 1.02 / 4),
        # A window of the record needs the payloads of all exchanges in flight.
        ({"record": {"keep": 20}}, 4 * 8 * 0.52 / 4, 4 * 8 * 1.02 / 4),
        # A landing of a low-rank codec needs them, too. The codec stays in the flush.
        ({"compression": {"codec": "lowrank:8"}}, 4 * 8, 4 * 8),
        # All chunks of a site, seven others of an eighth, and all means while an exchange runs.
        ({"outer": {"exchange": "reduce"}}, 2 * (3 - 1 / 8) * 0.52 / 4, 2 * (3 - 1 / 8) * 1.02 / 4),
        (
            {"outer": {"exchange": "reduce"}, "record": {"keep": 20}},
            (2 * (3 - 1 / 8) + 2 * (2 - 1 / 8)) * 0.52 / 4,
            (2 * (3 - 1 / 8) + 2 * (2 - 1 / 8)) * 1.02 / 4,
        ),
    ],
)
def test_payloads_of_exchanges_that_wait_count_where_they_are_held(
    sections: dict[str, Any], payloads: float, last: float
) -> None:
    config = run(sites=EIGHT, **sections)
    if "compression" in sections:
        width = parse_spec("lowrank:8").record.bytes_per_value / 4
        payloads, last = payloads * width, last * width
    whole_round = replace(as_the_run_file_says(config), delay=20)
    place = GpuPlacement(device(shared=True), 1, 1)
    (found,) = footprints(config, ModelOutline.of(config), place, EACH, whole_round)
    values = 12 + 2 * 4 / 4
    assert found.under_way == round((values + payloads) * found.parameters)
    assert found.under_way + found.flush == pytest.approx((values + last) * found.parameters, abs=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gate_keeps_anchors_or_gradients_of_what_is_in_flight(ranks: int) -> None:
    site = {"stages": ranks, "batch_size": 8}
    place = GpuPlacement(device(shared=True), 1, 1)
    gate = {"aggregation": "clip", "gate": True}

    def at(delay: int, **admission: Any) -> Footprint:
        config = run(sites=EIGHT, site=site, admission=admission)
        rounds = replace(as_the_run_file_says(config), delay=delay)
        return footprints(config, ModelOutline.of(config), place, EACH, rounds)[-1]

    for delay, waiting in ((5, 1), (20, 4)):
        plain, judged = at(delay), at(delay, **gate)
        parameters = plain.parameters
        # Of each exchange that runs, all eight sites' contributions are decoded before the vote.
        decoded = min(2, waiting) * 7 * 4 / 4
        # Exchanges share anchors but those that landed between their boundaries.
        kept, copied = 4 * (1 + (waiting - 1) / 4), 4 * waiting * (waiting - 1) / 2 / 4
        if ranks == 2:
            kept = copied = 4 * waiting / 4
        # Payloads of a gated run carry no second moments, but their size counts the same.
        assert judged.under_way - plain.under_way == pytest.approx(
            (decoded + kept) * parameters, abs=2
        )
        assert judged.snapshot - plain.snapshot == pytest.approx(copied * parameters, abs=2)
        # In the flush all fragments begin at the same anchors.
        last = (2 * 7 * 4 / 4 + 4) * parameters
        plain_last, judged_last = (each.under_way + each.flush for each in (plain, judged))
        assert judged_last == pytest.approx(max(plain_last + last, judged.under_way), abs=2)


def test_the_copy_for_the_record_has_no_probes() -> None:
    gate = {"aggregation": "clip", "gate": True}
    config = run(site={"stages": 2, "batch_size": 8}, admission=gate, record={"states_every": 2})
    found = of(config)[-1]
    assert found.snapshot - found.record_copy == found.parameters


def test_layers_of_different_sizes_leave_embedding_and_head_outside() -> None:
    """The first layers of many mixtures of experts are dense, and smaller than the largest."""
    whole = ModelOutline.of(run())
    uneven = ModelOutline.of(run())
    uneven.__dict__["_layers"] = {**whole._layers, 0: whole._layers[0] // 2}
    even, odd = (
        footprints(
            run(site={"shards": 4, "micro_batch_size": 2, "gradient_sync": "micro-batch"}),
            each,
            GpuPlacement(device(), 8, 1),
            EACH,
        )
        for each in (whole, uneven)
    )
    # What is no layer's is gathered all along, with its gradient.
    assert odd[0].copies - even[0].copies == 2 * 2 * (whole._layers[0] - whole._layers[0] // 2)


def test_a_processor_holds_all_ranks_of_its_site() -> None:
    config = run(site={"stages": 2, "shards": 2, "batch_size": 8, "micro_batch_size": 1})
    place = GpuPlacement(device(shared=True), 1, 1)
    found = of(config, place)
    assert all(each.outer_on_device for each in found)
    assert needed(found, place, config) == 2 * sum(each.device for each in found)
    gpu = GpuPlacement(device(), 4, 1)
    ranks = of(config, gpu)
    assert needed(ranks, gpu, config) == max(each.device for each in ranks)


# --- what to change ------------------------------------------------------------------------------


def tight(config: RunConfig, share: float) -> tuple[ModelOutline, GpuPlacement]:
    """A place whose GPUs have `share` of what the run needs."""
    outline = ModelOutline.of(config)
    place = GpuPlacement(device(), 8, 1)
    bytes_ = needed(footprints(config, outline, place, counted(config, outline)), place, config)
    smaller: Device = device(memory=int(bytes_ * share))
    return outline, GpuPlacement(smaller, 8, 1)


def test_advice_is_computed_and_makes_it_fit() -> None:
    config = run(
        site={"batch_size": 8, "micro_batch_size": 8},
        data={"sequence_length": 64, "tokenizer": "given"},
    )
    outline, place = tight(config, 0.7)
    found = advice(config, outline, place, place.gpus)
    assert 1 <= len(found) <= 3
    for change in found:
        assert change.fits
        assert change.needed <= place.device.memory
        assert change.text.startswith("--set ")
    # Half the micro-batch costs training nothing but bubbles: it comes first.
    assert found[0].values == {"site.micro_batch_size": 4}


def test_momentum_in_bf16_is_advised_where_the_outer_state_is_on_the_gpu() -> None:
    larger = {
        "site": {"batch_size": 8, "micro_batch_size": 8},
        "data": {"sequence_length": 64, "tokenizer": "given"},
    }
    config = run(outer={"device": "model"}, **larger)
    outline, place = tight(config, 0.99)
    found = [dict(change.values) for change in advice(config, outline, place, place.gpus)]
    assert found[:2] == [{"outer.device": "cpu"}, {"outer.momentum_dtype": "bf16"}]
    config = run(outer={"device": "cpu"})
    outline, place = tight(config, 0.98)
    assert {"outer.momentum_dtype": "bf16"} not in [
        dict(change.values) for change in advice(config, outline, place, place.gpus)
    ]


def test_where_one_change_does_not_do_they_are_taken_together() -> None:
    config = run(
        site={"batch_size": 8, "micro_batch_size": 8},
        data={"sequence_length": 64, "tokenizer": "given"},
    )
    outline, place = tight(config, 0.12)
    (found,) = advice(config, outline, place, place.gpus)
    assert len(found.values) > 1
    assert found.fits
    assert found.text.count("--set") == len(found.values)


def test_where_nothing_helps_enough_it_says_so() -> None:
    config = run(site={"batch_size": 8, "micro_batch_size": 2})
    outline, place = tight(config, 0.0001)
    found = advice(config, outline, place, place.gpus)
    assert [change.fits for change in found] == [False]


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"outer": {"device": "model"}}, {"outer.device": "cpu"}),
        (
            {"site": {"schedule": "gpipe", "stages": 2, "batch_size": 8, "micro_batch_size": 1}},
            {"site.schedule": "1f1b"},
        ),
    ],
)
def test_the_cheapest_change_comes_first(changes: dict[str, Any], first: dict[str, Any]) -> None:
    config = run(**changes)
    outline, place = tight(config, 0.95)
    assert dict(advice(config, outline, place, place.gpus)[0].values) == first
