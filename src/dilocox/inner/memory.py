"""Memory and disk that training needs, as arithmetic, and checks that a machine has enough.

All figures are lower bounds, so that no run is refused that would have worked. Activations are
those that every implementation keeps for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError
from dilocox.inner import computes_head_with_loss, head_loss_bytes, loss_bytes
from dilocox.inner.judging_memory import (
    decoded_bytes_per_parameter,
    gate_probe_bytes_per_parameter,
    probe_copy_bytes_per_parameter,
)
from dilocox.inner.preference import pair_loss_bytes
from dilocox.models import ChunkSpec
from dilocox.utils.cache_blocks import ON_DEVICE

GIB = 2**30
INNER_BYTES = {"adamw": 16, "muon": 12, "sgd": 8}
"""Bytes per parameter: fp32 parameter, gradient and moments. AdamW has two moments, Muon one. With
Muon, embedding and head have AdamW's two moments, which are not counted here."""


MOMENTUM_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per parameter of the outer momentum, by its dtype."""


def inner_bytes_per_parameter(config: RunConfig) -> int:
    """Return the bytes of parameter, gradient and the inner optimizer's moments, fp32."""
    return INNER_BYTES[config.inner.optimizer]


def outer_bytes_per_parameter(config: RunConfig) -> int:
    """Return the bytes of the outer state between exchanges.

    The outer state is anchor, momentum and reference, the residual, and two buffers for `eager`.
    """
    extra = 4 * config.compression.error_feedback + 8 * (config.outer.overlap == "eager")
    return 8 + MOMENTUM_BYTES[config.outer.momentum_dtype] + extra


UNDER_WAY = 12
"""Bytes per value of an exchange that waits for its landing, fp32: the contribution, the decoded
contribution, and the average. All three are on the device of the outer state (`outer.device`)."""
LANDING = 8
"""Bytes per value of a piece that lands on a CPU: displacements and new values. A CPU processes the
piece in small blocks."""
LANDING_VIEW = 4
"""Bytes per value of a piece that lands on a GPU: new values of the whole piece."""
LANDING_BLOCK = {"fp32": 12, "bf16": 18}
"""Bytes per value of one block of a landing on a GPU, where blocks are large: displacement, step
and other intermediates, by the dtype of the outer momentum."""
LANDING_BLOCK_EAGER = 20
"""The same with overlap `eager`, for every dtype of the outer momentum."""
EVALUATION = 4
"""Bytes per parameter of a rank, fp32: the copy of the trained parameters while the anchor is
evaluated (`Evaluator.standing_at`)."""
CAST = 2
"""Bytes per parameter of a stage without shards that computes in bf16: the bf16 copies of
weights."""
STAGING = 4
"""Bytes per value of the largest piece, for each staging buffer, pinned in the machine's memory."""
STAGINGS = 2
"""Staging buffers of a rank on a GPU: one for each direction."""


def under_way_bytes_per_parameter(config: RunConfig) -> float:
    """Return the least bytes of exchanges in flight, when one fragment waits for its landing."""
    return UNDER_WAY / config.outer.fragments


def landing_on_gpu(config: RunConfig, values: float) -> float:
    """Return the bytes that a piece of `values` values takes while it lands in a GPU's memory.

    Outer state and exchanges in flight are not included.
    """
    if config.exchanges_gradients:
        return 0.0  # there are no landings
    block = LANDING_BLOCK[config.outer.momentum_dtype]
    if config.outer.overlap == "eager":
        block = LANDING_BLOCK_EAGER
    return LANDING_VIEW * values + block * min(values, ON_DEVICE)


def staging_bytes_per_parameter(config: RunConfig) -> float:
    """Return the bytes of pinned staging buffers of a rank on a GPU, in the machine's memory."""
    return STAGING * STAGINGS / config.outer.fragments


def snapshot_bytes_per_parameter(config: RunConfig, waiting: float | None = None) -> float:
    """Return the bytes of the copy of a rank's state from which a checkpoint is written.

    The copy is in the machine's memory. It holds parameters, the inner optimizer's moments, the
    outer state, and the contributions of exchanges that wait for their landing. `waiting`: share of
    the fragments that wait. None means one fragment if the plan has a delay, else no fragment.
    Every run writes a checkpoint at its end.
    """
    if waiting is None:
        waiting = 1 / config.outer.fragments if config.outer.delay else 0.0
    return inner_bytes_per_parameter(config) - 4 + outer_bytes_per_parameter(config) + 4 * waiting


def record_copy_bytes_per_parameter(config: RunConfig, waiting: float | None = None) -> float:
    """Return the bytes of the copy of a round's first state, which is kept until it is recorded.

    The result is 0 in a run that records no states. The copy exists beside the copy for a
    checkpoint: at the end of a run both are made at the same moment. `waiting`: see
    `snapshot_bytes_per_parameter`.
    """
    kept = config.record.enabled and config.record.states_every and not config.exchanges_gradients
    return snapshot_bytes_per_parameter(config, waiting) if kept else 0.0


def window_copy_bytes_per_parameter(config: RunConfig) -> int:
    """Return the bytes of the copy of anchor and outer momentum that begins a recorded window.

    The copy is kept until it is recorded. Such copies exist only if `record.keep` limits the record
    (`dilocox.record.writer.windows`).
    """
    return 4 + MOMENTUM_BYTES[config.outer.momentum_dtype]


def donated_bytes_per_parameter(config: RunConfig) -> int:
    """Return the bytes of the copy that a donor sends to sites that enter a run of several sites.

    The copy has anchor and outer momentum, in the machine's memory. All sites that enter at once
    share it.
    """
    return window_copy_bytes_per_parameter(config) if len(config.sites) > 1 else 0


def gate_model_bytes_per_parameter(config: RunConfig) -> int:
    """Return the bytes of the second model, fp32, in which a gate tries contributions.

    Only the single rank of a site has it.
    """
    return 4 * (config.admission.gate and config.site.ranks == 1)


def activation_bytes(
    config: RunConfig, hf_config: Any, stage: int, layers: int, head: bool, width: int
) -> int:
    """Return the least bytes of activations that a rank of `stage` holds at its peak.

    Per layer and token, these are the inputs of the layer's two blocks and the hidden values of the
    feed-forward block; with activation checkpointing, the layer's input alone. The head adds the
    logits of one micro-batch and the memory of their loss.

    Args:
        config: the run file.
        hf_config: the model's Hugging Face configuration.
        stage: number of the rank's stage.
        layers: number of the model's layers on the rank.
        head: True if the rank has the head.
        width: bytes of the compute dtype.
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
    """Return True if the head gives all logits of a micro-batch at once, whatever their number.

    A loss that reads columns is a function of all logits.
    """
    return bool(config.loss_columns) or not computes_head_with_loss(config.site.schedule)


def logits_bytes(config: RunConfig, hf_config: Any, width: int, device: str = "cuda") -> int:
    """Return the bytes that head and loss of a micro-batch hold at their peak.

    The logits, of `width` bytes each, are included. `device`: type of the device.
    """
    tokens = config.site.micro_batch_size * config.data.sequence_length
    vocabulary = int(hf_config.vocab_size)
    if config.data.format == "preference":
        rows, length = config.site.micro_batch_size, config.data.sequence_length
        return pair_loss_bytes(rows, length, vocabulary, width)
    if config.data.columns:
        return 2 * width * tokens * vocabulary  # logits and their gradient: a user's loss has more
    if holds_whole_logits(config):
        return loss_bytes(tokens * vocabulary, width)
    return head_loss_bytes(tokens, vocabulary, int(hf_config.hidden_size), width, device)


def frozen_bytes(config: RunConfig, frozen: int, width: int, packed: int = 0) -> int:
    """Return the bytes that the frozen weights of an adapter run take at a rank, on its device.

    Shards divide them, but not those in four bits. A pipeline of shards gathers the divided ones
    for all of a step. A gate's second model has its own in fp32, or in four bits as the first one.

    Args:
        config: the run file.
        frozen: bytes of the frozen parameters of the rank's stage, over all shards.
        width: bytes of the compute dtype.
        packed: bytes of the stage's parameters in four bits.
    """
    site = config.site
    gathered = frozen if site.parts > 1 and site.stages > 1 else 0
    gate = gate_model_bytes_per_parameter(config) * (frozen + packed) // width
    return -(-frozen // site.shards) + packed + gathered + gate


def gpu_bytes(
    config: RunConfig,
    parameters: int,
    activations: int,
    width: int = 4,
    frozen: int = 0,
    packed: int = 0,
) -> int:
    """Return the least bytes that one rank needs on its GPU.

    The result is the larger of two needs: an inner step has gradients and activations; a landing in
    the GPU's memory happens while there are neither.

    Args:
        config: the run file.
        parameters: trained parameters of the rank's stage, over all shards.
        activations: bytes of activations, see `activation_bytes`.
        width: bytes of the compute dtype.
        frozen: bytes of the frozen parameters of the rank's stage, over all shards.
        packed: bytes of the stage's parameters in four bits, which every shard holds.
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
            landing += under_way * own  # no exchange is in flight during an inner step
    step = 4 * own
    if site.parts > 1 and site.stages > 1:
        # Parameters are gathered, and gradients whole, for all of the step (see `site_model`).
        step = (width + 4) * parameters
    lasting = per_parameter * own + frozen_bytes(config, frozen, width, packed)
    return round(lasting + max(step + activations, landing))


SURE_SHARE = 0.85
"""Share of a GPU's memory that training may safely fill. The rest is for needs that are not counted
here, such as the CUDA context, communication buffers and fragments."""
SURE_ACTIVATIONS = 3
"""Upper bound of a layer's real activations, as a multiple of `activation_bytes`."""


def whole_gradient_bytes(parameters: int, width: int) -> int:
    """Return the bytes that a rank of a sharded stage holds for `site.gradient_sync = "step"`.

    The rank holds the gathered `parameters` of `width` bytes, and the sums of their gradients,
    fp32.
    """
    return (width + 4) * parameters


def sums_whole_gradients(
    config: RunConfig,
    hf_config: Any,
    chunks: Sequence[ChunkSpec],
    memory: int | None,
    width: int,
) -> bool:
    """Return True if the shards and replicas of a site of one stage reduce gradients once per step.

    `auto` decides by declared numbers alone, so that a run decides the same at every start.

    Args:
        config: the run file.
        hf_config: the model's Hugging Face configuration.
        chunks: chunks of the stage.
        memory: bytes of the smallest GPU of the site; None on CPUs.
        width: bytes of the compute dtype.
    """
    site = config.site
    if site.stages > 1 or site.parts == 1:
        return False
    if site.gradient_sync != "auto":
        return site.gradient_sync == "step"
    if memory is None:
        return False
    parameters = sum(chunk.trained for chunk in chunks)
    frozen = sum(chunk.frozen_bytes(width) for chunk in chunks)
    packed = sum(chunk.packed_bytes for chunk in chunks)
    layers = int(hf_config.num_hidden_layers)
    head = activation_bytes(config, hf_config, 0, 0, True, width)
    kept = activation_bytes(config, hf_config, 0, layers, False, width)
    sure = gpu_bytes(config, parameters, SURE_ACTIVATIONS * kept + head, width, frozen, packed)
    whole = whole_gradient_bytes(parameters, width) + frozen
    return sure + whole <= SURE_SHARE * memory


def gpu_problem(site: str, stage: int, needed: int, available: int, sharing: int = 1) -> str | None:
    """Return why a rank that needs `needed` bytes does not fit into `available`; None if it fits.

    `sharing`: number of ranks, of all sites, that share the GPU. With several, `available` is this
    rank's part of the GPU.
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

    Call this in the rank's process before it allocates memory on the device. `ranks_here`: number
    of ranks, of all sites, on this machine. If the machine has fewer GPUs, ranks share them in
    equal parts. `site` and `stage` are for the message.
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
    parameters = sum(chunk.trained for chunk in chunks)
    frozen = sum(chunk.frozen_bytes(width) for chunk in chunks)
    packed = sum(chunk.packed_bytes for chunk in chunks)
    needed = gpu_bytes(config, parameters, activations, width, frozen, packed)
    # `auto` holds whole gradients only if they fit.
    if config.site.asks_for_whole_gradients:
        needed += whole_gradient_bytes(parameters, width) + frozen
    free, total = torch.cuda.mem_get_info(device)
    sharing = 1
    # A launcher may make one GPU alone visible to each rank, under the same number.
    if ranks_here > config.site.ranks:
        sharing = ranks_on(device.index or 0, torch.cuda.device_count(), ranks_here)
    # The other ranks may have allocated their parts already, or not yet.
    available = min(free, total // sharing) if sharing > 1 else free
    problem = gpu_problem(site, stage, needed, available, sharing)
    if problem is not None:
        raise ConfigError(problem)


def ranks_on(gpu: int, gpus: int, ranks_here: int) -> int:
    """Return how many of the ranks on a machine with `gpus` GPUs use GPU number `gpu`.

    Ranks take the GPUs in turn (see `resolve_device`).
    """
    return max(1, len(range(gpu, ranks_here, max(1, gpus))))


def host_bytes_per_parameter(config: RunConfig, on_gpu: bool, windows: bool = False) -> float:
    """Return the least bytes per parameter that a site's ranks hold in the machine's memory.

    The peak is while a checkpoint, and a state for the record, are written; or while an exchange
    holds the decoded contributions of several sites. Payloads are not counted, because their size
    is not certain; nor is the copy of a donor, which is gone by then. `on_gpu`: the ranks train on
    GPUs. `windows`: `record.keep` limits the record.
    """
    outer, under_way = outer_bytes_per_parameter(config), under_way_bytes_per_parameter(config)
    judged = 0.0
    if config.admission.examines:
        # Beside its own contribution, at least those of the sites without which no exchange is
        # decided.
        judged = 4 / config.outer.fragments
        judged += decoded_bytes_per_parameter(config, config.outer.min_sites)
    if on_gpu and config.outer.device == "model":
        outer, under_way, judged = 0, 0.0, 0.0
    copies = snapshot_bytes_per_parameter(config) + record_copy_bytes_per_parameter(config)
    copies += probe_copy_bytes_per_parameter(config)
    # Without a delay no exchange is in flight at the end of a round, when checkpoints begin.
    copies = under_way + copies if config.outer.delay else max(under_way, copies)
    copies += window_copy_bytes_per_parameter(config) if windows else 0
    beside = outer + max(copies, judged) + gate_probe_bytes_per_parameter(config)
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
    frozen: Sequence[tuple[int, int]] = (),
) -> str | None:
    """Return why the sites do not fit into the machine's memory; None if they fit.

    Args:
        config: the run file.
        parameters: trained parameters of each stage.
        sites_here: number of sites on this machine.
        available: bytes of memory that are free.
        on_gpu: True if the ranks train on GPUs.
        windows: True if `record.keep` limits the record.
        frozen: bytes of each stage's frozen parameters: those that shards divide, and those in
            four bits. Empty if all parameters are trained.
    """
    per_parameter = host_bytes_per_parameter(config, on_gpu, windows)
    beside = [0 if on_gpu else _frozen_on_host(config, *each) for each in frozen]
    needed = sites_here * (sum(parameters) * per_parameter + sum(beside))
    if needed <= available:
        return None
    sites = "1 site here needs" if sites_here == 1 else f"{sites_here} sites here need"
    each = [own * per_parameter for own in parameters]
    each = [own + more for own, more in zip(each, beside or [0] * len(each), strict=True)]
    stage = max(range(len(each)), key=lambda index: each[index])
    return (
        f"{sites} {needed / GIB:.1f} GiB of memory (stage {stage} alone "
        f"{each[stage] / GIB:.1f} GiB), {available / GIB:.1f} GiB are "
        "free; use a smaller model, or put the sites on machines of their own"
    )


def _frozen_on_host(config: RunConfig, frozen: int, packed: int) -> int:
    """Return the least bytes of a stage's frozen weights at all ranks of a site without GPUs."""
    site, width = config.site, config.site.value_bytes
    held = site.shards * frozen_bytes(config, frozen, width, packed)
    return site.replicas * held


def disk_bytes(config: RunConfig, parameters: int, sites_here: int) -> int:
    """Return the bytes of all kept checkpoints, one more that is being written, and the model."""
    # A checkpoint has no gradients, but has the contributions in flight.
    outer = outer_bytes_per_parameter(config) + 4 // config.outer.fragments
    each = parameters * (inner_bytes_per_parameter(config) - 4 + outer)
    return sites_here * each * (config.checkpoint.keep + 1) + 4 * parameters
