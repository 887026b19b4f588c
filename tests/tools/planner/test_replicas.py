"""Sites of several replicas (hybrid sharding): GPUs, memory, step time, advice, what is printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.planned_runs import FREE, device, link, run

from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError
from dilocox.tools.planner import step_time as timing
from dilocox.tools.planner.activations import Kept
from dilocox.tools.planner.advice import advice
from dilocox.tools.planner.bottleneck import sentence
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.host_memory import host_memory
from dilocox.tools.planner.memory_footprint import Footprint, counted, footprints, needed
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.outer_path import outer_path
from dilocox.tools.planner.plan import plan_run
from dilocox.tools.planner.predict import predict
from dilocox.tools.planner.render import as_json, as_text
from dilocox.tools.planner.trial_run import alone

EACH = Kept(layer=200_000, entry=90_000, selected=120_000, head=500_000, exact=True)
NODES = GpuPlacement(device(), 4, 2)
"""Two nodes of four GPUs."""
FABRIC = 1e8
"""Bytes per second between nodes; 1e10 inside one."""


def site(**values: Any) -> RunConfig:
    return run(site={"batch_size": 16, "micro_batch_size": 1, **values})


def of(config: RunConfig, place: GpuPlacement = NODES) -> list[Footprint]:
    return footprints(config, ModelOutline.of(config), place, EACH)


def test_all_replicas_have_gpus() -> None:
    config = site(replicas=4, stages=2, shards=1)
    product = r"site\.replicas x site\.stages x site\.shards = 8"
    with pytest.raises(ConfigError, match=rf"plain:4x1: 4 GPUs for {product} ranks"):
        plan_run(config, [GpuPlacement(device(), 4, 1)] * 2, [link(1e6)] * 2, FABRIC)
    plan = plan_run(config, [NODES] * 2, [link(1e6)] * 2, FABRIC, methods=())
    text = as_text(plan)
    assert "2 sites x 4 replicas x 2 stages x 1 shard\n" in text
    assert "8 of 8 GPUs used" in text
    assert as_json(plan)["layout"]["replicas"] == 4
    one = plan_run(site(shards=4), [NODES] * 2, [link(1e6)] * 2, FABRIC, methods=())
    assert "2 sites x 1 stage x 4 shards\n" in as_text(one)


def test_each_replica_computes_its_part_of_the_batch() -> None:
    configs = [site(shards=8), site(replicas=2, shards=4), site(replicas=8)]
    outline = ModelOutline.of(configs[0])
    times = [timing.step_time(each, outline, NODES, FABRIC) for each in configs]
    assert len({each.compute for each in times}) == 1
    # Every replica's optimizer steps over all of the model.
    assert times[1].optimizer == pytest.approx(2 * times[0].optimizer)
    assert times[2].optimizer == pytest.approx(8 * times[0].optimizer)
    cores = GpuPlacement(device(shared=True, cores=8.0), 1, 1)
    shared = [timing.step_time(each, outline, cores, FABRIC) for each in configs]
    assert len({each.compute for each in shared}) == 1
    assert shared[1].optimizer == pytest.approx(2 * shared[0].optimizer)


def test_traffic_of_replicas_by_hand() -> None:
    config = site(replicas=2, shards=4, gradient_sync="step")
    outline = ModelOutline.of(config)
    whole = outline.parameters
    # Shards stay on a node: parameters once in bf16, gradients in fp32.
    inside = timing.fsdp_seconds(config, outline, NODES, FABRIC)
    assert inside == pytest.approx(3 / 4 * whole * (2 + 4) / 1e10)
    # A ring over two replicas for each of four shards, all through a node's network.
    ring = 2 * (2 - 1) / 2 * 4 * whole / 4
    between = timing.replica_seconds(config, outline, NODES, FABRIC)
    assert between == pytest.approx(4 * ring / FABRIC)
    together = timing.replica_seconds(config, outline, GpuPlacement(device(), 8, 1), FABRIC)
    assert together == pytest.approx(ring / 1e10)
    assert timing.replica_seconds(site(shards=8), outline, NODES, FABRIC) == 0.0
    # What a site of one stage hides of it: the last micro-batch's backward pass.
    found = timing.step_time(config, outline, NODES, FABRIC)
    _, backward = timing.chunk_seconds(config, outline, 1e12, 16)
    unhidden = inside - found.compute + between - sum(backward)
    assert found.compute < inside
    assert sum(backward) < between
    assert found.traffic == pytest.approx(unhidden)
    slow = GpuPlacement(device(bf16=1e9), 4, 2)
    _, backward = timing.chunk_seconds(config, outline, 1e9, 16)
    found = timing.step_time(config, outline, slow, FABRIC)
    assert inside < found.compute
    assert found.traffic == pytest.approx(max(0.0, between - sum(backward)))


def test_pipelines_of_replicas_stay_on_their_nodes() -> None:
    """Ranks lie replica by replica: each pipeline of four stages has a node of its own."""
    pipes = site(replicas=2, stages=4)
    outline = ModelOutline.of(pipes)
    hop = timing.hop_seconds(pipes, outline, NODES, FABRIC, 16)
    assert hop == pytest.approx(16 * 32 * 2 / 1e10), "bf16, as FSDP's chunks compute"
    sharded = site(stages=4, shards=2)
    across = timing.hop_seconds(sharded, ModelOutline.of(sharded), NODES, FABRIC, 16)
    assert across == pytest.approx(2 * 16 * 32 * 2 / FABRIC)
    found = timing.step_time(pipes, outline, NODES, FABRIC)
    between = timing.replica_seconds(pipes, outline, NODES, FABRIC)
    assert between > 0
    assert found.traffic > between, "nothing hides it"


@pytest.mark.parametrize("sync", ["step", "micro-batch"])
def test_replicas_are_faster_where_shards_gather_between_nodes(sync: str) -> None:
    rates = []
    for layout in ({"shards": 8}, {"replicas": 2, "shards": 4}):
        config = site(gradient_sync=sync, **layout)
        outline = ModelOutline.of(config)
        assert needed(of(config), NODES, config) <= NODES.device.memory
        found = predict(config, NODES, link(1e12), 2, fabric=FABRIC, outline=outline)
        rates.append(found.tokens_per_second)
    assert rates[1] > 1.2 * rates[0]


def test_every_replica_holds_its_own_weights() -> None:
    (sharded,) = of(site(shards=4, gradient_sync="micro-batch"))
    (found,) = of(site(replicas=2, shards=4, gradient_sync="micro-batch"))
    assert found == sharded
    # FSDP holds a whole model, too, where replicas have one shard each.
    (one,) = of(site(replicas=2, gradient_sync="step"))
    assert one.weights == 4 * one.parameters
    assert one.copies == 2 * one.parameters
    assert one.lasting == 0
    assert one.gradients == 8 * one.parameters
    assert one.gathered == 0


def test_further_replicas_exchange_nothing() -> None:
    config, place = site(replicas=4, stages=2), GpuPlacement(device(shared=True), 1, 1)
    ranks = of(config, place)
    first = sum(each.device for each in ranks)
    others = sum(
        each.weights + each.optimizer + each.gradients + each.copies + each.activations
        for each in ranks
    )
    assert needed(ranks, place, config) == first + 3 * others
    assert others < first
    # Beside GPUs the first replica's ranks alone have state: those of a node, not of all.
    host = host_memory([(GpuPlacement(device(), 8, 1), of(config))], config)
    assert host is not None
    assert host.ranks == 2
    host = host_memory([(GpuPlacement(device(), 1, 8), of(config))], config)
    assert host is not None
    assert host.ranks == 1


def test_payloads_are_those_of_one_replica() -> None:
    found = [
        predict(run(site=layout, control={"adapt": "off"}), NODES, link(1e6), 2, fabric=FABRIC)
        for layout in ({"shards": 2}, {"shards": 2, "replicas": 2})
    ]
    assert found[0].payload_bytes == found[1].payload_bytes


def test_a_landing_is_handed_on_to_the_other_replicas() -> None:
    one, two = site(shards=4), site(replicas=2, shards=4)
    card = device(pcie_rate=1e9)
    rate = timing.replica_rate(two, NODES, FABRIC)
    assert rate == FABRIC / 4
    before, after = (outer_path(each, card, rate).landing_copies for each in (one, two))
    assert before == 8 / 1e9
    assert after == pytest.approx(before + 4 / rate)
    cores = replace(card, shared=True)
    assert outer_path(two, cores, rate) == FREE


def test_where_shards_gather_between_nodes_replicas_are_named() -> None:
    config = site(shards=8, gradient_sync="micro-batch")
    plan = plan_run(config, [NODES] * 2, [link(1e12)] * 2, FABRIC, methods=())
    assert plan.hybrid is not None
    assert (plan.hybrid.replicas, plan.hybrid.shards) == (2, 4)
    text = sentence(plan)
    assert text.startswith("Traffic inside the site:")
    assert "--set site.replicas=2 --set site.shards=4" in text
    # Not where a replica on one node needs more than its GPUs have, nor where there is one node.
    outline = ModelOutline.of(config)
    most = needed(footprints(config, outline, NODES, counted(config, outline)), NODES, config)
    full = GpuPlacement(device(memory=most), 4, 2)
    assert plan_run(config, [full] * 2, [link(1e12)] * 2, FABRIC, methods=()).hybrid is None
    one = GpuPlacement(device(), 8, 1)
    assert plan_run(config, [one] * 2, [link(1e12)] * 2, FABRIC, methods=()).hybrid is None


def test_replicas_that_do_not_fit_become_shards() -> None:
    config = site(replicas=8, gradient_sync="micro-batch", batch_size=8)
    outline, place = ModelOutline.of(config), NODES
    bytes_ = needed(footprints(config, outline, place, counted(config, outline)), place, config)
    small = GpuPlacement(device(memory=int(0.7 * bytes_)), 4, 2)
    found = [dict(change.values) for change in advice(config, outline, small, small.gpus)]
    assert {"site.replicas": 4, "site.shards": 2} in found


def test_a_calibration_is_of_one_replica() -> None:
    raw = alone(site(replicas=2, shards=4), 2, 16)
    assert raw["site"]["replicas"] == 1
