"""Memory of a rank, part by part (`Footprint`), and of a whole device (`needed`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.config.site import ZERO_BUBBLE
from dilocox.coordinator.controller.choice import Choice, as_the_run_file_says
from dilocox.coordinator.protocol.round_plan import AT_ONCE
from dilocox.coordinator.server.plan_builder import FLUSH_CODEC
from dilocox.inner.judging_memory import (
    decoded_bytes_per_parameter,
    gate_probe_bytes_per_parameter,
    probe_copy_bytes_per_parameter,
)
from dilocox.inner.memory import (
    CAST,
    EVALUATION,
    LANDING,
    STAGING,
    STAGINGS,
    UNDER_WAY,
    donated_bytes_per_parameter,
    gate_model_bytes_per_parameter,
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
    """Memory of a rank of one stage, in bytes.

    The *device* is the rank's GPU, or the machine's memory if the rank has no GPU. A step, an
    evaluation, a landing and the gathering of whole tensors come one after another: gradients and
    activations are freed before one of the others begins.
    """

    stage: int
    layers: tuple[int, int]
    """Number of layers, and index of the first one."""
    parameters: int
    """Trained parameters of the stage, over all shards."""
    frozen: int
    """Frozen parameters of the stage, over all shards; 0 without adapters."""
    weights: int
    gradients: int
    optimizer: int
    copies: int
    """bf16 casts and gathered parameters that exist during a step."""
    lasting: int
    """The part of `copies` that stays between steps."""
    activations: int
    evaluation: int
    """Copy of the trained parameters while the anchor is evaluated."""
    gathered: int
    """The largest tensor as a whole, fp32. The shards of a stage gather it for the record and for
    the published model."""
    outer: int
    """Anchor, momentum, reference and residual. If they lie in the machine's memory, also what a
    landing needs in addition."""
    outer_on_device: bool
    """Whether the outer state lies on the device."""
    exchanges: int
    """Exchanges in flight on the GPU. 0 if the outer state is not on a GPU."""
    landing: int
    """Needs of a landing on the GPU in addition to the outer state and `exchanges`."""
    under_way: int
    """Exchanges in flight in the machine's memory. If their values stay on the GPU, only their
    payloads and what a gate keeps of their boundaries, the flush included."""
    flush: int
    """Needs of the flush of all fragments, at the end of a run, in addition to `exchanges` or
    `under_way`."""
    snapshot: int
    """Copy that a checkpoint is written from, in the machine's memory."""
    record_copy: int
    """Copy of a state for the record, in the machine's memory."""
    window_copy: int
    """Copy of the anchor at the beginning of a window of the record, in the machine's memory."""
    staging: int
    """Pinned buffers in the machine's memory, which all copies of a GPU pass through."""
    published: int
    """The stage's whole anchor, in the machine's memory, at the stage's first shard only."""
    donated: int
    """Copy of anchor and outer momentum for sites that enter at the start, in the machine's memory.
    No exchange is in flight then."""
    shared: bool
    """Whether the device is the machine's memory."""

    @property
    def peak(self) -> int:
        """Bytes of the largest phase on the device (step, evaluation, landing or gathering),
        without what lasts."""
        step = self.gradients + self.copies - self.lasting + self.activations
        landing = self.landing + (self.flush if self.outer_on_device else 0)
        gathered = self.gathered + (self.published if self.shared else 0)
        return max(step, self.evaluation, landing, gathered, self.donated if self.shared else 0)

    @property
    def device(self) -> int:
        """Bytes on the rank's device at its fullest moment."""
        lasting = self.weights + self.optimizer + self.lasting + self.exchanges
        lasting += self.outer if self.outer_on_device else 0
        if self.shared:
            lasting += self.under_way + self.snapshot + self.record_copy + self.window_copy
        return lasting + self.peak

    @property
    def follower(self) -> int:
        """Bytes on the device of the same rank in another replica than the first.

        Such a rank does not exchange, keeps no checkpoints and evaluates no anchor of its own.
        """
        step = self.gradients + self.copies + self.activations
        return self.weights + self.optimizer + step

    @property
    def host_lasting(self) -> int:
        """Bytes of host memory beside a GPU, without exchanges and the published model."""
        if self.shared:
            return 0
        outer = 0 if self.outer_on_device else self.outer
        return outer + self.snapshot + self.record_copy + self.window_copy + self.staging

    @property
    def host_exchanges(self) -> int:
        """Bytes of host memory of exchanges at the end of a run, where they need most; or of the
        copy for sites that enter, before there are exchanges."""
        if self.shared:
            return 0
        return max(self.under_way + (0 if self.outer_on_device else self.flush), self.donated)

    @property
    def host(self) -> int:
        """Bytes of host memory of the stage's first shard; 0 if the device is host memory."""
        published = 0 if self.shared else self.published
        return self.host_lasting + max(self.host_exchanges, published)


def footprints(
    config: RunConfig,
    outline: ModelOutline,
    place: GpuPlacement,
    each: Kept,
    rounds: Choice | None = None,
) -> list[Footprint]:
    """Return the footprint of one rank of every stage.

    Args:
        config: The run.
        outline: Outline of the run's model.
        place: GPUs of the site.
        each: Bytes that a micro-batch keeps until its backward pass
            (`dilocox.tools.planner.activations`).
        rounds: Plan of the rounds. None: the run file's settings.
    """
    site = config.site
    rounds = rounds or as_the_run_file_says(config)
    shared, fragments = place.device.shared, config.outer.fragments
    windows = has_windows(config, outline.parameters)
    there, waiting = _exchanged(config, rounds, shared, windows), _waiting(rounds)
    in_memory = shared or config.outer.device == "cpu"
    once = reduces_once(config, outline, place.device)
    probes = probe_copy_bytes_per_parameter(config, waiting, rounds.fragments)
    of_frozen = outline.stage_frozen_bytes(config.site.value_bytes)
    packed = outline.stage_packed_bytes
    found = []
    for stage, chunks in enumerate(outline.stages):
        parameters, frozen = outline.stage_parameters[stage], outline.stage_frozen[stage]
        own = -(-parameters // site.shards)
        layers = sum(chunk.end_layer - chunk.first_layer for chunk in chunks)
        gradients, copies, lasting = _stepped(config, outline, stage, once)
        optimizer = -(-_moments(config, outline, stage) // site.shards)
        copied = snapshot_bytes_per_parameter(config, waiting / rounds.fragments)
        # With Muon, the bytes of moments per parameter differ between tensors.
        copied = (copied - inner_bytes_per_parameter(config) + 8) * own + optimizer
        whole = site.shards > 1 or not in_memory
        found.append(
            Footprint(
                stage=stage,
                layers=(layers, chunks[0].first_layer),
                parameters=parameters,
                frozen=frozen,
                weights=4 * own + -(-of_frozen[stage] // site.shards) + packed[stage],
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
                snapshot=round(copied + probes * own),
                record_copy=round(copied) if record_copy_bytes_per_parameter(config) else 0,
                window_copy=window_copy_bytes_per_parameter(config) * own if windows else 0,
                staging=0 if shared else round(STAGING * STAGINGS * own / fragments),
                published=(4 * own if shared else 4 * parameters) if whole else 0,
                donated=donated_bytes_per_parameter(config) * own,
                shared=shared,
            )
        )
    return found


def _largest(outline: ModelOutline, stage: int) -> int:
    """Return the number of values of the stage's largest tensor."""
    return max(math.prod(shape) for shape in outline.shapes[stage].values())


def _stepped(
    config: RunConfig, outline: ModelOutline, stage: int, once: bool
) -> tuple[int, int, int]:
    """Return (gradients, copies, lasting): bytes of a rank's gradients, of a step's copies of
    parameters, and of the copies among them that stay between steps.

    `once`: shards reduce gradients once per step.
    """
    site = config.site
    parameters = outline.stage_parameters[stage]
    own = -(-parameters // site.shards)
    width = config.site.value_bytes
    gradients, copies, lasting = 4 * own, 0, 0
    if site.parts > 1 and once:
        # Parameters are gathered once per step. Gradients are summed up unsharded, in fp32, and
        # reduced at the end of the step (torch.distributed.pipelining, `site.gradient_sync`).
        copies = width * parameters + outline.stage_frozen_bytes(width)[stage]
        gradients = 4 * parameters + 4 * own
    elif site.parts > 1:
        copies = _gathered_at_a_time(outline, parameters, width)
    elif width == 2:
        copies = lasting = CAST * parameters
    # A weight in NF4 is dequantised while it is used.
    copies += width * outline.unpacked
    of_frozen = outline.stage_frozen_bytes(width)[stage] + outline.stage_packed_bytes[stage]
    gate = gate_model_bytes_per_parameter(config) * (parameters + of_frozen // width)
    if config.admission.gate and site.ranks > 1:
        # The gate measures slopes with gradients. It needs a copy of the trained parameters and
        # the points at which slopes are measured (Evaluator.gradient_probe).
        copies += EVALUATION * own + 4 * own // config.outer.fragments
    return gradients, copies + gate, lasting + gate


def _gathered_at_a_time(outline: ModelOutline, parameters: int, width: int) -> int:
    """Return the peak bytes of parameters that FSDP has gathered and gradients not yet reduced.

    This holds for one stage of `parameters` parameters, where both happen per micro-batch
    (`dilocox.inner.fsdp.Units`). `width`: bytes per gathered value. Gradients have the same width,
    and are reduced in fp32.
    """
    embedding, closing = outline.outer_units
    layer = outline.layer_parameters
    if outline.frozen:
        # Frozen weights have no gradients: two layers at a time, or the last layer with the head.
        trained, layer = outline.adapter_layer, outline.read_layer
        outside = outline.read - outline.read_inside_layers - embedding - closing
        return width * (layer + max(layer, closing) + 3 * trained + outside) + 4 * trained
    # A tied embedding and head have no unit of their own: they stay gathered throughout, and their
    # gradients are reduced after the backward pass.
    rest = parameters - outline.inside_layers - embedding - closing
    # The backward pass begins with norm and head, while the last layer is gathered. Then two layers
    # at a time are gathered, while gradients of the unit before are reduced. The embedding is
    # gathered in the forward pass only, and its gradient comes after activations are freed.
    first = width * (2 * closing + layer) + 4 * closing
    middle = width * 3 * layer + 4 * max(layer, closing)
    return max(first, middle) + 2 * width * rest


def _waiting(rounds: Choice) -> int:
    """Return the largest number of fragments that are between boundary and landing at once."""
    number = -(-rounds.delay * rounds.fragments // rounds.slots)
    return min(max(1, number), rounds.fragments)


@dataclass(frozen=True)
class _Exchanged:
    """Bytes per parameter of a rank for the outer state and exchanges, by where they lie."""

    outer: float
    on_gpu: float
    in_memory: float
    flush: float


def _exchanged(config: RunConfig, rounds: Choice, shared: bool, windows: bool) -> _Exchanged:
    """Return the bytes per parameter of outer state, exchanges and landings.

    `shared`: training runs on processors. Counted for exchanges: the values of fragments that wait
    for their landing; the decoded values of exchanges that are not decided; and payloads. Values
    lie where the outer state is; payloads pass through the machine's memory. `windows`: payloads
    are recorded in windows.
    """
    waiting, fragments, pieces = _waiting(rounds), rounds.fragments, config.outer.fragments
    values, payloads = _in_flight(config, rounds.codec, waiting, fragments, windows)
    probes = gate_probe_bytes_per_parameter(config, waiting, fragments)
    outer = float(outer_bytes_per_parameter(config))
    last_values = last_payloads = last_probes = 0.0
    if not config.exchanges_gradients:
        codec = rounds.codec if parse_spec(rounds.codec).record.sparse else FLUSH_CODEC
        last_values, last_payloads = _in_flight(config, codec, pieces, pieces, windows)
        # All fragments begin before one lands, so the anchors of all are the same.
        last_probes = 4.0 if config.admission.gate else 0.0
    if shared or config.outer.device == "cpu":
        in_memory = values + payloads + probes
        flush = max(0.0, last_values + last_payloads + last_probes - in_memory)
        return _Exchanged(outer + LANDING / pieces, 0.0, in_memory, flush)
    count = len(config.sites) if config.outer.exchange == "gather" else 2
    decoding = count * parse_spec(rounds.codec).record.bytes_per_value / fragments
    in_memory = max(payloads + probes, last_payloads + last_probes)
    flush = max(0.0, last_values - values)
    return _Exchanged(outer, values + decoding, in_memory, flush)


def _in_flight(
    config: RunConfig, codec: str, number: int, fragments: int, windows: bool
) -> tuple[float, float]:
    """Return the bytes per parameter of the values and of the payloads of exchanges in flight.

    Args:
        config: The run.
        codec: Codec of the payloads.
        number: Number of the exchanges. At most `AT_ONCE` of them run; all others wait for their
            landing, or for their turn.
        fragments: Fragments into which a round divides the parameters.
        windows: Payloads are recorded in windows.
    """
    running, sites, record = min(AT_ONCE, number), len(config.sites), parse_spec(codec).record
    during = after = float(sites)
    if config.outer.exchange == "reduce":
        # All chunks of this site, the others' of one chunk and, during the exchange, all means.
        after = 2 - 1 / sites
        during = after + 1
    # A window that begins needs the payloads of exchanges in flight, and the landing of a low-rank
    # codec computes with them. All others are freed after the exchange.
    held = not config.exchanges_gradients and (windows or record.agrees_first)
    count = running * during + (number - running) * after * held
    values = UNDER_WAY * number / fragments
    values += running * decoded_bytes_per_parameter(config, sites, fragments)
    return values, count * record.bytes_per_value / fragments


def _moments(config: RunConfig, outline: ModelOutline, stage: int) -> int:
    """Return the bytes of the inner optimizer's moments of a whole stage.

    AdamW has two fp32 moments per parameter, SGD none. Muon has one for matrices of the layers;
    AdamW trains all other tensors of a Muon run, copies of tied tensors included.
    """
    parameters = outline.stage_parameters[stage]
    if config.inner.optimizer != "muon":
        return (inner_bytes_per_parameter(config) - 8) * parameters
    shapes = outline.shapes[stage]
    matrices = sum(
        math.prod(shape) for name, shape in shapes.items() if is_hidden_matrix(name, shape)
    )
    return 4 * matrices + 8 * (parameters - matrices)


def needed(places: Sequence[Footprint], place: GpuPlacement, config: RunConfig) -> int:
    """Return the bytes that a device needs: of the largest rank, or of all ranks that share it."""
    if place.device.shared:
        first = sum(each.device for each in places)
        others = (config.site.replicas - 1) * sum(each.follower for each in places)
        return (first + others) * config.site.shards
    return max(each.device for each in places)


def in_flight(config: RunConfig, stage: int) -> int:
    """Return how many micro-batches' activations a rank of `stage` holds at its peak.

    A micro-batch counts once per chunk of the rank. The numbers follow the warm-up of PyTorch's
    schedules:

    - `1f1b`: its own micro-batch, and one per later stage.
    - `interleaved-1f1b`: one per stage for each chunk but one, two per later stage, and one.
    - `gpipe`: all micro-batches.
    - Zero-bubble schedules: one per stage and chunk, for the weights' half of the backward pass.
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
    # With checkpointing one layer at a time is computed again, and saves all its activations.
    held = flying * layers * kept + (each.layer if saving else 0)
    pipeline = config.site.stages > 1
    if pipeline:
        # One gradient in transfer; and outputs that were sent on, kept until their gradient comes.
        held += each.entry
        held += flying * each.entry if any(not chunk.head for chunk in chunks) else 0
    head = each.head if has_head else 0
    # The head counts for one micro-batch: the others' head has finished its backward pass by then.
    # `gpipe` also keeps logits and loss values of all other micro-batches: two of three copies.
    others = flying - 1 if pipeline and config.site.schedule == "gpipe" else 0
    held += head + others * head * 2 // 3
    return held + max(0, _newest_gradient(config, outline, stage) - layers * kept - head)


def _newest_gradient(config: RunConfig, outline: ModelOutline, stage: int) -> int:
    """Return the bytes of the largest gradient of a bf16 copy.

    The gradient exists until it has been added to the fp32 parameter's gradient. With FSDP it is
    0: gradients of gathered parameters are part of `_gathered_at_a_time`.
    """
    if config.site.precision == "fp32" or config.site.parts > 1:
        return 0
    return 2 * max(math.prod(shape) for shape in outline.shapes[stage].values())


def counted(config: RunConfig, outline: ModelOutline) -> Kept:
    """Return `dilocox.tools.planner.activations.kept` from a cache: most changes of a run do not
    change its result."""
    return _counted(_Question(config, outline))


class _Question:
    """Arguments of `kept` as a cache key: two keys are equal if `kept` returns the same."""

    def __init__(self, config: RunConfig, outline: ModelOutline) -> None:
        self.config, self.outline = config, outline
        self._key = (
            config.site.micro_batch_size,
            config.data.sequence_length,
            config.site.precision,
            config.site.device,
            config.model.attention,
            holds_whole_logits(config),
            config.loss_columns,
            config.data.rows.packing,
            repr(config.adapter),
            outline.hf_config.to_json_string(),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and other._key == self._key


@lru_cache(maxsize=64)
def _counted(what: _Question) -> Kept:
    return kept(what.config, what.outline)
