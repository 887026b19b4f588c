"""What a rank holds, part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.config.site import ZERO_BUBBLE
from dilocox.coordinator.controller.choice import Choice, as_the_run_file_says
from dilocox.inner.memory import (
    CAST,
    EVALUATION,
    LANDING,
    STAGING,
    STAGINGS,
    UNDER_WAY,
    gate_model_bytes_per_parameter,
    gate_probe_bytes_per_parameter,
    holds_whole_logits,
    inner_bytes_per_parameter,
    landing_on_gpu,
    outer_bytes_per_parameter,
    record_copy_bytes_per_parameter,
    snapshot_bytes_per_parameter,
    window_copy_bytes_per_parameter,
)
from dilocox.inner.optimizer import is_hidden_matrix
from dilocox.record.writer.windows import has_windows
from dilocox.tools.planner.activations import Kept, kept
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.step_time import reduces_once


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank of one stage. `device` is its GPU, or the machine's memory without one.

    A step, an evaluation, a landing and the gathering of whole tensors come in turn: gradients and
    activations are gone when one of the others begins.
    """

    stage: int
    layers: tuple[int, int]
    """Number of layers, and the first of them."""
    parameters: int
    """Of the stage, over all shards."""
    weights: int
    gradients: int
    optimizer: int
    copies: int
    """Casts and gathered parameters that live during the step."""
    lasting: int
    """Of these copies, those that stay between steps."""
    activations: int
    evaluation: int
    """What the rank trains on, put aside while the anchor is evaluated."""
    gathered: int
    """The largest tensor whole, fp32, as the shards of a stage gather it for the record and for the
    published model."""
    outer: int
    """Anchor, momentum, reference and residual; and what a landing takes beside them, where that
    is the machine's memory."""
    outer_on_device: bool
    exchanges: int
    """Exchanges on the GPU, where the outer state is there."""
    landing: int
    """What a landing takes beside the outer state and exchanges, on the GPU."""
    under_way: int
    """Exchanges in the machine's memory: all of them, or their payloads where values stay on the
    GPU."""
    flush: int
    """By how much the exchange of all fragments at the end of a run takes more than `exchanges` or
    `under_way`."""
    snapshot: int
    """The copy that a checkpoint is written from, in the machine's memory."""
    record_copy: int
    """The copy of a state for the record, in the machine's memory."""
    window_copy: int
    """The copy of the anchor with which a window of the record begins, in the machine's memory."""
    staging: int
    """Pinned buffers in the machine's memory, through which a GPU's copies go."""
    published: int
    """The stage's anchor whole, in the machine's memory, at its first shard alone."""
    shared: bool
    """The device is the machine's memory."""

    @property
    def peak(self) -> int:
        """Bytes of what comes in turn on the device, beside what lasts: the most of them."""
        step = self.gradients + self.copies - self.lasting + self.activations
        landing = self.landing + (self.flush if self.outer_on_device else 0)
        gathered = self.gathered + (self.published if self.shared else 0)
        return max(step, self.evaluation, landing, gathered)

    @property
    def device(self) -> int:
        """Bytes on the rank's device."""
        lasting = self.weights + self.optimizer + self.lasting + self.exchanges
        lasting += self.outer if self.outer_on_device else 0
        if self.shared:
            lasting += self.under_way + self.snapshot + self.record_copy + self.window_copy
        return lasting + self.peak

    @property
    def follower(self) -> int:
        """Bytes on the device of the same rank of a further replica, which does not exchange, keeps
        no checkpoints and does not evaluate an anchor of its own."""
        step = self.gradients + self.copies + self.activations
        return self.weights + self.optimizer + step

    @property
    def host_lasting(self) -> int:
        """Bytes in the machine's memory beside a GPU, exchanges and the published model aside."""
        if self.shared:
            return 0
        outer = 0 if self.outer_on_device else self.outer
        return outer + self.snapshot + self.record_copy + self.window_copy + self.staging

    @property
    def host_exchanges(self) -> int:
        """Bytes of exchanges there, at the end of a run, where they are most."""
        if self.shared:
            return 0
        return self.under_way + (0 if self.outer_on_device else self.flush)

    @property
    def host(self) -> int:
        """Bytes of the stage's first shard in the machine's memory, beside its device."""
        published = 0 if self.shared else self.published
        return self.host_lasting + max(self.host_exchanges, published)


def footprints(
    config: RunConfig,
    outline: ModelOutline,
    place: GpuPlacement,
    each: Kept,
    rounds: Choice | None = None,
) -> list[Footprint]:
    """Every stage's rank. `each`: what a micro-batch keeps (dilocox.tools.planner.activations);
    `rounds`: as they are exchanged, without it as the run file says."""
    site = config.site
    rounds = rounds or as_the_run_file_says(config)
    shared, fragments = place.device.shared, config.outer.fragments
    there = _exchanged(config, rounds, shared)
    in_memory = shared or config.outer.device == "cpu"
    once = reduces_once(config, outline, place.device)
    windows = has_windows(config, outline.parameters)
    found = []
    for stage, chunks in enumerate(outline.stages):
        parameters = outline.stage_parameters[stage]
        own = -(-parameters // site.shards)
        layers = sum(chunk.end_layer - chunk.first_layer for chunk in chunks)
        gradients, copies, lasting = _stepped(config, outline, stage, once)
        optimizer = -(-_moments(config, outline, stage) // site.shards)
        copied = snapshot_bytes_per_parameter(config, there.waiting)
        # Moments of Muon are not the same for all parameters.
        copied = (copied - inner_bytes_per_parameter(config) + 8) * own + optimizer
        whole = site.shards > 1 or not in_memory
        found.append(
            Footprint(
                stage=stage,
                layers=(layers, chunks[0].first_layer),
                parameters=parameters,
                weights=4 * own,
                gradients=gradients,
                optimizer=optimizer,
                copies=copies,
                lasting=lasting,
                activations=_activations(config, outline, stage, each),
                evaluation=EVALUATION * own,
                gathered=4 * _largest(outline, stage) if site.shards > 1 else 0,
                outer=round(there.outer * own),
                outer_on_device=shared or not in_memory,
                exchanges=round(there.on_gpu * own),
                landing=0 if in_memory else round(landing_on_gpu(config, own / fragments)),
                under_way=round(there.in_memory * own),
                flush=round(there.flush * own),
                snapshot=round(copied),
                record_copy=round(copied) if record_copy_bytes_per_parameter(config) else 0,
                window_copy=window_copy_bytes_per_parameter(config) * own if windows else 0,
                staging=0 if shared else round(STAGING * STAGINGS * own / fragments),
                published=(4 * own if shared else 4 * parameters) if whole else 0,
                shared=shared,
            )
        )
    return found


def _largest(outline: ModelOutline, stage: int) -> int:
    """Values of the stage's largest tensor."""
    return max(math.prod(shape) for shape in outline.shapes[stage].values())


def _stepped(
    config: RunConfig, outline: ModelOutline, stage: int, once: bool
) -> tuple[int, int, int]:
    """Bytes of a rank's gradients, of copies that a step makes of parameters, and of those copies
    that stay between steps. `once`: shards reduce gradients once per step."""
    site = config.site
    parameters = outline.stage_parameters[stage]
    own = -(-parameters // site.shards)
    bf16 = site.precision != "fp32"
    width = 2 if bf16 else 4
    gradients, copies, lasting = 4 * own, 0, 0
    if site.parts > 1 and once:
        # Parameters are gathered once per step; gradients are summed up whole, in fp32, and
        # reduced at its end (torch.distributed.pipelining, `site.gradient_sync`).
        copies = width * parameters
        gradients = 4 * parameters + 4 * own
    elif site.parts > 1:
        copies = _gathered_at_a_time(outline, parameters, width)
    elif bf16:
        copies = lasting = CAST * parameters
    gate = gate_model_bytes_per_parameter(config) * parameters
    if config.admission.gate and site.ranks > 1:
        # Slopes are measured with gradients, beside a copy of what is trained and the points
        # where they are measured (Evaluator.gradient_probe).
        copies += EVALUATION * own + 4 * own // config.outer.fragments
    return gradients, copies + gate, lasting + gate


def _gathered_at_a_time(outline: ModelOutline, parameters: int, width: int) -> int:
    """Bytes of what FSDP gathers of one stage with so many `parameters`, and of gradients until
    they are reduced, where both happen for each micro-batch (dilocox.inner.fsdp.Units).

    Gradients come as wide as what was gathered, and are reduced in fp32.
    """
    embedding, closing = outline.outer_units
    layer = outline.layer_parameters
    # No unit of their own have a tied embedding and head: they are gathered all along, and their
    # gradients are reduced when the backward pass is through.
    rest = parameters - outline.inside_layers - embedding - closing
    # The backward pass begins with norm and head, while the last layer is gathered. Then come two
    # layers at a time, while what came before is reduced. The embedding is gathered in the forward
    # pass alone, and its gradient comes when activations are gone.
    first = width * (2 * closing + layer) + 4 * closing
    middle = width * 3 * layer + 4 * max(layer, closing)
    return max(first, middle) + 2 * width * rest


_WIDTHS = {"none": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.02, "int4": 0.52}
_WIDTH_OF_OTHERS = 0.3
"""Bytes per value of payloads, at most."""


def _waiting(rounds: Choice) -> float:
    """The share of the fragments that is between boundary and landing at once."""
    number = -(-rounds.delay * rounds.fragments // rounds.slots)
    return min(max(1, number), rounds.fragments) / rounds.fragments


@dataclass(frozen=True)
class _Exchanged:
    """Bytes per parameter of a rank that the outer path takes, by where they lie."""

    waiting: float
    """Share of the fragments."""
    outer: float
    on_gpu: float
    in_memory: float
    flush: float


def _exchanged(config: RunConfig, rounds: Choice, shared: bool) -> _Exchanged:
    """The outer state, exchanges and landings. `shared`: processors train.

    Exchanges: what waits for its landing, and of the one whose payloads are decoded these and one
    site's values. Values stay where the outer state is; payloads pass the machine's memory.
    """
    waiting, pieces = _waiting(rounds), config.outer.fragments
    width = _WIDTHS.get(parse_spec(rounds.codec).kind, _WIDTH_OF_OTHERS)
    count = len(config.sites) if config.outer.exchange == "gather" else 2
    payloads = count * width / rounds.fragments
    values = UNDER_WAY * waiting + 4 / rounds.fragments + payloads
    probes = gate_probe_bytes_per_parameter(config)
    outer = float(outer_bytes_per_parameter(config))
    flush = 0.0 if config.exchanges_gradients else UNDER_WAY * (1 - waiting)
    if shared or config.outer.device == "cpu":
        return _Exchanged(waiting, outer + LANDING / pieces, 0.0, values + probes, flush)
    return _Exchanged(waiting, outer, values, payloads + probes, flush)


def _moments(config: RunConfig, outline: ModelOutline, stage: int) -> int:
    """Bytes of the inner optimizer's moments, of a whole stage: two of AdamW, none of SGD; one of
    Muon for the layers' matrices, whose other tensors AdamW trains, copies of tied ones, too."""
    parameters = outline.stage_parameters[stage]
    if config.inner.optimizer != "muon":
        return (inner_bytes_per_parameter(config) - 8) * parameters
    shapes = outline.shapes[stage]
    matrices = sum(
        math.prod(shape) for name, shape in shapes.items() if is_hidden_matrix(name, shape)
    )
    return 4 * matrices + 8 * (parameters - matrices)


def needed(places: Sequence[Footprint], place: GpuPlacement, config: RunConfig) -> int:
    """Bytes that a device needs: of the largest rank, or of all ranks that share it."""
    if place.device.shared:
        first = sum(each.device for each in places)
        others = (config.site.replicas - 1) * sum(each.follower for each in places)
        return (first + others) * config.site.shards
    return max(each.device for each in places)


def in_flight(config: RunConfig, stage: int) -> int:
    """Micro-batches, counted by chunk, whose activations a rank of `stage` holds at its peak.

    As PyTorch's schedules warm up: `1f1b` one per later stage and its own; `interleaved-1f1b` a
    round of all stages for each further chunk, and two per later stage; `gpipe` all of them.
    Zero-bubble schedules hold on to what the weights' half of the backward pass needs: one for each
    stage and chunk.
    """
    site = config.site
    count, stages, chunks = site.micro_batches, site.stages, site.chunks
    if stages == 1:
        return 1
    if site.schedule == "gpipe":
        return count
    if site.schedule == "1f1b":
        return min(count, stages - stage)
    if site.schedule in ZERO_BUBBLE:
        return min(count, stages) * chunks
    warm = (chunks - 1) * stages + 2 * (stages - 1 - stage) + 1
    return min(count * chunks, warm)


def _activations(config: RunConfig, outline: ModelOutline, stage: int, each: Kept) -> int:
    chunks = outline.stages[stage]
    layers = max(chunk.end_layer - chunk.first_layer for chunk in chunks)
    has_head = any(chunk.head for chunk in chunks)
    flying = in_flight(config, stage)
    saving = config.model.activation_checkpointing
    kept = each.layer
    if saving:
        kept = each.selected if saving == "selective" else each.entry
    # With checkpointing one layer at a time is computed again with all that it saves.
    held = flying * layers * kept + (each.layer if saving else 0)
    pipeline = config.site.stages > 1
    if pipeline:
        # A gradient on its way; what was sent on is kept until its own gradient comes.
        held += each.entry
        held += flying * each.entry if any(not chunk.head for chunk in chunks) else 0
    head = each.head if has_head else 0
    # Of one micro-batch: what comes before the head is through its backward pass by then. `gpipe`
    # has the logits of all others, too, and what their losses have kept: two of three copies.
    others = flying - 1 if pipeline and config.site.schedule == "gpipe" else 0
    held += head + others * head * 2 // 3
    return held + max(0, _newest_gradient(config, outline, stage) - layers * kept - head)


def _newest_gradient(config: RunConfig, outline: ModelOutline, stage: int) -> int:
    """The largest gradient of a bf16 copy, which is there until it is added to its master's.

    FSDP's are counted with what it gathers.
    """
    if config.site.precision == "fp32" or config.site.parts > 1:
        return 0
    return 2 * max(math.prod(shape) for shape in outline.shapes[stage].values())


def counted(config: RunConfig, outline: ModelOutline) -> Kept:
    """`dilocox.tools.planner.activations.kept`, remembered: most changes leave it as it is."""
    return _counted(_Question(config, outline))


class _Question:
    """Arguments of `kept`; equal where its answer is."""

    def __init__(self, config: RunConfig, outline: ModelOutline) -> None:
        self.config, self.outline = config, outline
        self._key = (
            config.site.micro_batch_size,
            config.data.sequence_length,
            config.site.precision,
            config.site.device,
            config.model.attention,
            holds_whole_logits(config),
            outline.hf_config.to_json_string(),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and other._key == self._key


@lru_cache(maxsize=64)
def _counted(what: _Question) -> Kept:
    return kept(what.config, what.outline)
