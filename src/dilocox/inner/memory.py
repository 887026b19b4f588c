"""What training needs, as arithmetic: bytes of states and activations, and who has too few.

Figures are lower bounds, so that nothing is refused that would have run; activations are those
that every implementation keeps for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError
from dilocox.inner import computes_head_with_loss, head_loss_bytes, loss_bytes
from dilocox.models import ChunkSpec
from dilocox.utils.cache_blocks import ON_DEVICE

GIB = 2**30
INNER_BYTES = {"adamw": 16, "muon": 12, "sgd": 8}
"""fp32 parameter, gradient and moments, per parameter: two of AdamW, one of Muon (whose
embedding and head have AdamW's two)."""


MOMENTUM_BYTES = {"fp32": 4, "bf16": 2}
"""Of the outer optimizer, per parameter."""


def inner_bytes_per_parameter(config: RunConfig) -> int:
    """Parameter, gradient and the inner optimizer's moments, fp32."""
    return INNER_BYTES[config.inner.optimizer]


def outer_bytes_per_parameter(config: RunConfig) -> int:
    """Anchor, momentum and reference, residual, and what `eager` keeps, between exchanges."""
    extra = 4 * config.compression.error_feedback + 8 * (config.outer.overlap == "eager")
    return 8 + MOMENTUM_BYTES[config.outer.momentum_dtype] + extra


UNDER_WAY = 12
"""Bytes per value of an exchange that waits for its landing, fp32: the contribution, what the
others saw of it, and the average. They lie where the outer state lies (`outer.device`)."""
LANDING = 8
"""Bytes per value of a piece that lands on processors, which work block by block: how far its
parameters have moved, and new values."""
LANDING_VIEW = 4
"""The same on a GPU, where blocks are large: new values of the whole piece, and of a block ..."""
LANDING_BLOCK = {"fp32": 12, "bf16": 18}
"""... displacement, step and what else is computed, by the dtype of the outer momentum; ..."""
LANDING_BLOCK_EAGER = 20
"""... and of overlap `eager`, whatever that dtype."""
EVALUATION = 4
"""Bytes per parameter of a rank, fp32: the copy of what the rank trains on while the anchor is
evaluated (`Evaluator.standing_at`)."""
CAST = 2
"""Bytes per parameter of a stage without shards that computes in bf16: the weights' bf16 copies."""
STAGING = 4
"""Bytes per value of the largest piece, pinned in the machine's memory, of each staging buffer."""
STAGINGS = 2
"""Staging buffers of a rank on a GPU: one for each direction."""


def under_way_bytes_per_parameter(config: RunConfig) -> float:
    """What exchanges hold, at least: one waits for its landing."""
    return UNDER_WAY / config.outer.fragments


def landing_on_gpu(config: RunConfig, values: float) -> float:
    """Bytes that a piece of `values` takes while it lands in a GPU's memory, beside the outer state
    and what is under way."""
    if config.exchanges_gradients:
        return 0.0  # there are no landings
    block = LANDING_BLOCK[config.outer.momentum_dtype]
    if config.outer.overlap == "eager":
        block = LANDING_BLOCK_EAGER
    return LANDING_VIEW * values + block * min(values, ON_DEVICE)


def staging_bytes_per_parameter(config: RunConfig) -> float:
    """Pinned staging buffers of a rank on a GPU, in the machine's memory."""
    return STAGING * STAGINGS / config.outer.fragments


def snapshot_bytes_per_parameter(config: RunConfig, waiting: float | None = None) -> float:
    """The copy of a rank's state that a checkpoint is written from, in the machine's memory.

    Parameters, the inner optimizer's moments, the outer state, and the contributions of exchanges
    that wait for their landing. `waiting`: their share of the fragments, without it one of them
    where they wait at all. Every run writes a checkpoint at its end.
    """
    if waiting is None:
        waiting = 1 / config.outer.fragments if config.outer.delay else 0.0
    return inner_bytes_per_parameter(config) - 4 + outer_bytes_per_parameter(config) + 4 * waiting


def record_copy_bytes_per_parameter(config: RunConfig, waiting: float | None = None) -> float:
    """The copy of a state in which a round begins, until the record has it; none in a run without
    such states.

    It is there beside a checkpoint's: at the end of a run both are made at the same moment.
    """
    kept = config.record.enabled and config.record.states_every and not config.exchanges_gradients
    return snapshot_bytes_per_parameter(config, waiting) if kept else 0.0


def window_copy_bytes_per_parameter(config: RunConfig) -> int:
    """The copy of anchor and outer momentum with which a window of the record begins, until the
    record has it. Only where `record.keep` bounds the record (dilocox.record.writer.windows)."""
    return 4 + MOMENTUM_BYTES[config.outer.momentum_dtype]


def gate_model_bytes_per_parameter(config: RunConfig) -> int:
    """The model, fp32, in which a gate tries contributions: beside the rank's own, if it is the
    site's only one."""
    return 4 * (config.admission.gate and config.site.ranks == 1)


def gate_probe_bytes_per_parameter(config: RunConfig) -> float:
    """What a gate keeps of one boundary in the machine's memory, fp32: the whole model's anchors
    to try contributions at, or a fragment's gradients where a site has several ranks."""
    if not config.admission.gate:
        return 0
    return 4 if config.site.ranks == 1 else 4 / config.outer.fragments


def activation_bytes(
    config: RunConfig, hf_config: Any, stage: int, layers: int, head: bool, width: int
) -> int:
    """Activations that a rank of `stage` holds at its peak, at least.

    `layers` of the model are on the rank, `head` if the last is; `width`: bytes of the compute
    dtype. Per layer and token these are the inputs of its two blocks and the feed-forward's
    hidden values, with activation checkpointing the layer's input alone; for one micro-batch the
    head's logits and what their loss needs.
    """
    tokens = config.site.micro_batch_size * config.data.sequence_length
    hidden = int(hf_config.hidden_size)
    experts = any(
        getattr(hf_config, key, None)
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    inner = 0 if experts else int(getattr(hf_config, "intermediate_size", None) or 0)
    per_layer = 2 * hidden + inner
    if config.site.schedule == "gpipe" and config.site.stages > 1:
        in_flight = config.site.micro_batches
    elif config.site.schedule == "1f1b":
        in_flight = min(config.site.micro_batches, config.site.stages - stage)
    else:
        in_flight = 1
    kept = per_layer
    if config.model.activation_checkpointing:
        # `selective` keeps the attention's output beside the layer's input, and more.
        kept = hidden * (2 if config.model.activation_checkpointing == "selective" else 1)
    logits = logits_bytes(config, hf_config, width) if head else 0
    return layers * kept * in_flight * tokens * width + logits


def holds_whole_logits(config: RunConfig) -> bool:
    """Whether the head gives all logits of a micro-batch, whatever their number."""
    return not computes_head_with_loss(config.site.schedule)


def logits_bytes(config: RunConfig, hf_config: Any, width: int, device: str = "cuda") -> int:
    """What head and loss of a micro-batch hold at their peak, logits of `width` bytes with it.

    `device`: type of the device.
    """
    tokens = config.site.micro_batch_size * config.data.sequence_length
    vocabulary = int(hf_config.vocab_size)
    if holds_whole_logits(config):
        return loss_bytes(tokens * vocabulary, width)
    return head_loss_bytes(tokens, vocabulary, int(hf_config.hidden_size), width, device)


def gpu_bytes(config: RunConfig, parameters: int, activations: int, width: int = 4) -> int:
    """Bytes that one rank needs on its GPU, at least. `parameters`: of its stage, over all shards;
    `width`: bytes of the compute dtype.

    The most of two moments: an inner step with gradients and activations, and a landing in the
    GPU's memory, when neither are there.
    """
    site, outer = config.site, config.outer
    own = parameters / site.shards
    per_parameter: float = inner_bytes_per_parameter(config) - 4
    per_parameter += gate_model_bytes_per_parameter(config)
    per_parameter += CAST if width < 4 and site.parts == 1 else 0
    landing = 0.0
    if outer.device == "model":
        per_parameter += outer_bytes_per_parameter(config)
        under_way = under_way_bytes_per_parameter(config)
        landing = landing_on_gpu(config, own / outer.fragments)
        if outer.delay:
            per_parameter += under_way
        else:
            landing += under_way * own  # nothing is under way while an inner step is taken
    step = 4 * own
    if site.parts > 1 and site.stages > 1:
        # Gathered for the whole step, and gradients whole until its end (dilocox.inner.site_model).
        step = (width + 4) * parameters
    return round(per_parameter * own + max(step + activations, landing))


SURE_SHARE = 0.85
"""Of a GPU's memory, that training may fill without trouble: the rest is for what is not counted
here, such as the context, communication buffers and fragments."""
SURE_ACTIVATIONS = 3
"""Layers keep at most so many times what `activation_bytes` counts of them."""


def whole_gradient_bytes(parameters: int, width: int) -> int:
    """What a rank of a sharded stage holds for `site.gradient_sync = "step"`: gathered
    `parameters` of `width` bytes, and the sums of their gradients, fp32."""
    return (width + 4) * parameters


def sums_whole_gradients(
    config: RunConfig,
    hf_config: Any,
    chunks: Sequence[ChunkSpec],
    memory: int | None,
    width: int,
) -> bool:
    """Whether the shards and replicas of a site of one stage reduce gradients once per step.

    `memory`: bytes of the smallest GPU of the site, None on CPUs. `auto` goes by declared numbers
    only, so that a run takes the same way at every start. `width`: bytes of the compute dtype.
    """
    site = config.site
    if site.stages > 1 or site.parts == 1:
        return False
    if site.gradient_sync != "auto":
        return site.gradient_sync == "step"
    if memory is None:
        return False
    parameters = sum(chunk.parameters for chunk in chunks)
    layers = int(hf_config.num_hidden_layers)
    head = activation_bytes(config, hf_config, 0, 0, True, width)
    kept = activation_bytes(config, hf_config, 0, layers, False, width)
    sure = gpu_bytes(config, parameters, SURE_ACTIVATIONS * kept + head, width)
    return sure + whole_gradient_bytes(parameters, width) <= SURE_SHARE * memory


def gpu_problem(site: str, stage: int, needed: int, available: int, sharing: int = 1) -> str | None:
    """Why a rank with `needed` bytes does not fit into `available`, or none.

    `sharing`: ranks of all sites that use one GPU, of which `available` is a part then.
    """
    if needed <= available:
        return None
    has, mend = "the GPU has", ""
    if sharing > 1:
        has = f"its part of a GPU that {sharing} ranks of the sites here share has"
        mend = "give the sites GPUs or machines of their own, "
    return (
        f'site "{site}": stage {stage} needs {needed / GIB:.1f} GiB, {has} '
        f"{available / GIB:.1f}; {mend}raise [site] stages or lower micro_batch_size"
    )


def check_gpu(
    config: RunConfig,
    hf_config: Any,
    chunks: Sequence[ChunkSpec],
    site: str,
    stage: int,
    device: torch.device,
    precision: torch.dtype,
    ranks_here: int = 1,
) -> None:
    """Raise `ConfigError` if a rank that holds `chunks` does not fit on `device`; CPUs pass.

    To be called in the rank's process before anything is put on the device. `ranks_here`: of all
    sites on this machine. Where there are fewer GPUs, each rank may use its part of one.
    """
    if device.type != "cuda":
        return
    width = precision.itemsize
    activations = activation_bytes(
        config,
        hf_config,
        stage,
        layers=sum(chunk.end_layer - chunk.first_layer for chunk in chunks),
        head=any(chunk.head for chunk in chunks),
        width=width,
    )
    parameters = sum(chunk.parameters for chunk in chunks)
    needed = gpu_bytes(config, parameters, activations, width)
    # `auto` takes it only where it fits.
    if config.site.asks_for_whole_gradients:
        needed += whole_gradient_bytes(parameters, width)
    free, total = torch.cuda.mem_get_info(device)
    sharing = 1
    # A launcher may show each rank of a site one GPU alone, under the same number.
    if ranks_here > config.site.ranks:
        sharing = ranks_on(device.index or 0, torch.cuda.device_count(), ranks_here)
    # The others may have taken their parts already, or not yet.
    available = min(free, total // sharing) if sharing > 1 else free
    problem = gpu_problem(site, stage, needed, available, sharing)
    if problem is not None:
        raise ConfigError(problem)


def ranks_on(gpu: int, gpus: int, ranks_here: int) -> int:
    """Of the ranks on a machine with so many `gpus`, those on number `gpu`: they are dealt out in
    turn (see `resolve_device`)."""
    return max(1, len(range(gpu, ranks_here, max(1, gpus))))


def host_bytes_per_parameter(config: RunConfig, on_gpu: bool, windows: bool = False) -> float:
    """What a site's ranks hold in the machine's own memory, per parameter of the model, at least:
    while a checkpoint is written, and a state for the record.

    `windows`: `record.keep` bounds the record.
    """
    outer, under_way = outer_bytes_per_parameter(config), under_way_bytes_per_parameter(config)
    if on_gpu and config.outer.device == "model":
        outer, under_way = 0, 0.0
    copies = snapshot_bytes_per_parameter(config) + record_copy_bytes_per_parameter(config)
    # Without a delay no exchange is under way where a round ends, and checkpoints are begun.
    copies = under_way + copies if config.outer.delay else max(under_way, copies)
    copies += window_copy_bytes_per_parameter(config) if windows else 0
    beside = outer + copies + gate_probe_bytes_per_parameter(config)
    if on_gpu:
        return beside + staging_bytes_per_parameter(config)
    site, whole = config.site, 0
    if site.asks_for_whole_gradients:
        whole = site.shards * whole_gradient_bytes(1, 2 if site.precision == "bf16" else 4)
    inner = inner_bytes_per_parameter(config) + gate_model_bytes_per_parameter(config)
    return site.replicas * (inner + whole) + beside


def host_problem(
    config: RunConfig,
    parameters: list[int],
    sites_here: int,
    available: int,
    on_gpu: bool,
    windows: bool = False,
) -> str | None:
    """Why `sites_here` sites with stages of `parameters` do not fit into `available` bytes of
    the machine's memory, or none. `windows`: `record.keep` bounds the record."""
    per_parameter = host_bytes_per_parameter(config, on_gpu, windows)
    needed = sites_here * sum(parameters) * per_parameter
    if needed <= available:
        return None
    sites = "1 site here needs" if sites_here == 1 else f"{sites_here} sites here need"
    stage = max(range(len(parameters)), key=lambda index: parameters[index])
    return (
        f"{sites} {needed / GIB:.1f} GiB of memory (stage {stage} alone "
        f"{parameters[stage] * per_parameter / GIB:.1f} GiB), {available / GIB:.1f} GiB are "
        "free; use a smaller model, or put the sites on machines of their own"
    )


def disk_bytes(config: RunConfig, parameters: int, sites_here: int) -> int:
    """All kept checkpoints, one being written, and the model."""
    # Gradients are in no checkpoint, contributions under way are.
    outer = outer_bytes_per_parameter(config) + 4 // config.outer.fragments
    each = parameters * (inner_bytes_per_parameter(config) - 4 + outer)
    return sites_here * each * (config.checkpoint.keep + 1) + 4 * parameters
