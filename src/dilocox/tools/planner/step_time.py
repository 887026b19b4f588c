"""Cost model of an inner step at a site: computation, pipeline bubbles, traffic inside the site.

It is pure arithmetic. A forward pass takes two operations per multiply-add, a backward pass four.
Activation checkpointing adds two (`true`) or one (`"selective"`) for the layers computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.config.run_config import RunConfig
from dilocox.inner import stage_of_chunk
from dilocox.inner.memory import sums_whole_gradients
from dilocox.inner.optimizer import is_hidden_matrix
from dilocox.tools.planner.hardware_table import Device, GpuPlacement
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.variants import on_device

OPTIMIZER_BYTES = {"adamw": 28, "muon": 20, "sgd": 12}
"""Bytes read and written per parameter and step: parameter, gradient and moments in fp32."""
NEWTON_SCHULZ = 5
"""Iterations of Muon's orthonormalisation (dilocox.inner.muon)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an inner step at one site, by cause. The parts add up to the step."""

    compute: float
    """Computation of the busiest rank."""
    bubble: float
    """Pipeline bubbles: the busiest rank waits for other stages."""
    traffic: float
    """Traffic of activations, FSDP and replicas inside the site that computation does not hide."""
    optimizer: float
    hops: float = 0.0
    """The part of `traffic` of values between pipeline stages."""
    replicas: float = 0.0
    """The part of `traffic` of gradients between replicas. The rest is traffic of FSDP."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.bubble + self.traffic + self.optimizer


def step_time(
    config: RunConfig, outline: ModelOutline, place: GpuPlacement, fabric: float
) -> StepTime:
    """Return the time of an inner step of the run's batch at `place`.

    `fabric`: bytes per second of a node's network inside the site.
    """
    config = on_device(config, place.device)
    site, device = config.site, place.device
    bf16 = site.precision != "fp32"
    rate = device.rate(bf16)
    tokens = site.micro_batch_size * config.data.sequence_length
    forward, backward = chunk_seconds(config, outline, rate, tokens)
    optimizer = optimizer_seconds(config, outline, place, rate)
    if device.shared:
        # Ranks share the cores: what one rank leaves idle, another rank uses.
        passes = site.parts * site.micro_batches
        return StepTime(passes * (sum(forward) + sum(backward)), 0.0, 0.0, optimizer)
    alone = makespan(config, forward, backward)
    busiest = site.micro_batches * max(_by_stage(config, forward, backward))
    hop = hop_seconds(config, outline, place, fabric, tokens)
    with_hops = makespan(config, [f + hop for f in forward], [b + hop for b in backward])
    inside = fsdp_seconds(config, outline, place, fabric)
    between = replica_seconds(config, outline, place, fabric)
    if site.stages == 1:
        # FSDP gathers and reduces layer by layer during the computation. Replicas average their
        # gradients during the last backward pass only.
        inside = max(0.0, inside - busiest)
        between = max(0.0, between - sum(backward))
    hops = with_hops - alone
    traffic = hops + inside + between
    return StepTime(busiest, alone - busiest, traffic, optimizer, hops, between)


RECOMPUTED: dict[bool | str, float] = {False: 0.0, True: 2.0, "selective": 1.0}
"""Operations per multiply-add that the backward pass recomputes, by
`model.activation_checkpointing`."""


def chunk_seconds(
    config: RunConfig, outline: ModelOutline, rate: float, tokens: int
) -> tuple[list[float], list[float]]:
    """Return the (forward, backward) seconds of a micro-batch by chunk.

    `rate`: operations per second. `tokens`: tokens of a micro-batch.
    """
    again = RECOMPUTED[config.model.activation_checkpointing]
    forward, backward = [], []
    for chunk in outline.blueprint.cut:
        layers = chunk.compute - outline.head_compute(chunk)
        # Frozen weights get no gradients. Adapters are computed beside them.
        adapters, fixed = chunk.adapters or 0, chunk.fixed
        gradients = 4 * chunk.compute if chunk.adapters is None else 2 * chunk.compute
        forward.append(2 * (chunk.compute + adapters + fixed) * tokens / rate)
        backward.append((gradients + 4 * adapters + 2 * fixed + again * layers) * tokens / rate)
    return forward, backward


def makespan(config: RunConfig, forward: Sequence[float], backward: Sequence[float]) -> float:
    """Return the seconds from the start of the first micro-batch to the end of the last one.

    `forward`, `backward`: seconds of one micro-batch by chunk. With `gpipe` and `1f1b` the
    pipeline fills once and drains once. Interleaved schedules fill and drain in steps of one chunk
    (arXiv 2104.04473). Zero-bubble schedules fill the bubbles with the weights' half of the
    backward pass, which costs as much as a forward pass (arXiv 2401.10241).
    """
    site = config.site
    count, stages = site.micro_batches, site.stages
    every = _by_stage(config, forward, backward)
    busiest = max(every)
    if stages == 1:
        return count * busiest
    if site.chunks == 1:
        return sum(every) + (count - 1) * busiest
    waits = stages - 1
    if site.schedule == "interleaved-1f1b":
        return count * busiest + waits * busiest / site.chunks
    weights = max(forward)
    inputs = max(b - f for f, b in zip(forward, backward, strict=True))
    if site.schedule == "interleaved-zero-bubble":
        return count * busiest + waits * inputs
    return count * busiest + waits * max(0.0, inputs - weights)


def _by_stage(
    config: RunConfig, forward: Sequence[float], backward: Sequence[float]
) -> list[float]:
    """Return the seconds of one micro-batch at each stage."""
    site = config.site
    every = [0.0] * site.stages
    for chunk, (f, b) in enumerate(zip(forward, backward, strict=True)):
        every[stage_of_chunk(site.schedule, site.stages, site.chunks, chunk)] += f + b
    return every


def hop_seconds(
    config: RunConfig, outline: ModelOutline, place: GpuPlacement, fabric: float, tokens: int
) -> float:
    """Return the seconds in which a micro-batch's hidden states go to the next stage.

    The slowest hop counts. Ranks are placed on nodes replica by replica, and stage by stage in
    each replica. If the next stage is on another node, all shards of a stage send through one
    node's network.
    """
    site = config.site
    if site.stages == 1:
        return 0.0
    # Values between stages have the compute dtype, with and without shards.
    size = tokens * int(outline.hf_config.hidden_size) * site.value_bytes
    if stays_on_nodes(config, place, site.exchanging_ranks):
        return size / place.device.peer_rate
    return size * min(site.shards, place.per_node) / fabric


def stays_on_nodes(config: RunConfig, place: GpuPlacement, ranks: int) -> bool:
    """Return whether every group of `ranks` consecutive ranks of a site is on one node."""
    return config.site.ranks <= place.per_node or place.per_node % ranks == 0


def reduces_once(config: RunConfig, outline: ModelOutline, device: Device) -> bool:
    """Return whether FSDP gathers parameters and reduces gradients once per step.

    If not, it does both per micro-batch.
    """
    if config.site.stages > 1:
        return True
    memory = None if device.shared else device.memory
    width = on_device(config, device).site.value_bytes
    return sums_whole_gradients(config, outline.hf_config, outline.blueprint.cut, memory, width)


def fsdp_seconds(
    config: RunConfig, outline: ModelOutline, place: GpuPlacement, fabric: float
) -> float:
    """Return the seconds of gathering parameters and reducing gradients in the largest stage.

    Pipelines, and runs with `site.gradient_sync = "step"`, do both once per step: gathered
    parameters stay (`dilocox.inner.site_model`). Other runs gather twice per micro-batch, for the
    forward and the backward pass, and reduce once. Replicas do so in parallel.
    """
    site = config.site
    if site.shards == 1:
        return 0.0
    width = site.value_bytes
    once = reduces_once(config, outline, place.device)
    gathers, times = (1, 1) if once else (2, site.micro_batches)
    # Weights in NF4 are not gathered: every shard holds them.
    read = (each // width for each in outline.stage_frozen_bytes(width))
    sizes = zip(outline.stage_parameters, read, strict=True)
    # Frozen weights are gathered, but have no gradients.
    part = max(own * (gathers * width + 4) + frozen * gathers * width for own, frozen in sizes)
    size = times * part * (site.shards - 1) / site.shards
    if stays_on_nodes(config, place, site.shards):
        return size / place.device.peer_rate
    # A ring over several nodes crosses each node's network once.
    return size / min(fabric, place.device.peer_rate)


def replica_seconds(
    config: RunConfig, outline: ModelOutline, place: GpuPlacement, fabric: float
) -> float:
    """Return the seconds of averaging fp32 gradients over the replicas, once per step.

    Ranks with the same stage and shard form a ring, and average the gradients of their shard. If
    replicas are on several nodes, the rings of all ranks of a node share its network.
    """
    site = config.site
    if site.replicas == 1:
        return 0.0
    own = max(outline.stage_parameters) / site.shards
    size = 2 * (site.replicas - 1) / site.replicas * 4 * own
    return size / replica_rate(config, place, fabric)


def replica_rate(config: RunConfig, place: GpuPlacement, fabric: float) -> float:
    """Return the bytes per second between two ranks with the same stage and shard in different
    replicas, while all ranks of a node send."""
    site, peer_rate = config.site, place.device.peer_rate
    if site.ranks <= place.per_node:
        return peer_rate
    return min(fabric / min(site.exchanging_ranks, place.per_node), peer_rate)


def optimizer_seconds(
    config: RunConfig, outline: ModelOutline, place: GpuPlacement, rate: float
) -> float:
    """Return the seconds of the inner optimizer at the busiest rank.

    If ranks share the processor, it is the sum over all ranks. `rate`: operations per second.
    """
    site, kind = config.site, config.inner.optimizer
    # `memory_rate` of shared processors is that of one core; `rate` is that of all cores.
    cores = place.device.cores if place.device.shared else 1.0
    every = []
    for parameters, shapes in zip(outline.stage_parameters, outline.shapes, strict=True):
        seconds = OPTIMIZER_BYTES[kind] * parameters / (place.device.memory_rate * cores)
        if kind == "muon":
            seconds += orthonormalising_flops(shapes) / rate
        every.append(seconds)
    if place.device.shared:
        return site.replicas * sum(every)
    return max(every) / site.shards


def orthonormalising_flops(shapes: dict[str, tuple[int, ...]]) -> float:
    """Return the operations of Muon's Newton-Schulz iterations over the matrices in `shapes`."""
    total = 0.0
    for name, shape in shapes.items():
        if is_hidden_matrix(name, shape):
            short, long = min(shape), max(shape)
            total += NEWTON_SCHULZ * (4.0 * short * short * long + 2.0 * short**3)
    return total


def compute_limit(
    config: RunConfig, outline: ModelOutline, places: Sequence[GpuPlacement]
) -> float:
    """Return the tokens per second of all GPUs of all sites if no GPU ever waited."""
    total = 0.0
    for place in places:
        count = 1 if place.device.shared else place.gpus
        bf16 = on_device(config, place.device).site.precision != "fp32"
        total += count * place.device.rate(bf16)
    return math.inf if outline.compute == 0 else total / outline.flops_per_token
