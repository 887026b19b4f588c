"""How large payloads would be: from a model's shapes to bytes by codec, stage and piece.

The controller chooses among codecs by these numbers. They are computed once, where torch and the
model are at hand, and handed to the coordinator, which knows neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from dilocox.compression import Geometry, LowRank, compressor, frame_bytes
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.candidates import codecs
from dilocox.errors import ConfigError
from dilocox.inner import chunks_of_stage
from dilocox.models import ModelChunk, build_chunk
from dilocox.outer.layout import Layout, local_shapes, split_pieces
from dilocox.training.builder import ModelPlan

Shape = tuple[int, ...]


def bare_chunks(config: RunConfig, blueprint: ModelPlan, stage: int) -> Iterator[ModelChunk]:
    """The chunks of a stage, in order, on the meta device: names and shapes without weights."""
    site = config.site
    for index in chunks_of_stage(site.schedule, site.stages, site.chunks, stage):
        yield build_chunk(
            blueprint.hf_config,
            blueprint.cut[index],
            attention="eager",  # has the same parameters, and needs no GPU to be built
            activation_checkpointing=False,
        )


def stage_shapes(config: RunConfig, blueprint: ModelPlan, stage: int) -> dict[str, Shape]:
    """Whole shapes of a stage's parameters by full name, in model order; builds no weights."""
    shapes: dict[str, Shape] = {}
    for chunk in bare_chunks(config, blueprint, stage):
        shapes |= {chunk.full_name(n): tuple(p.shape) for n, p in chunk.named_parameters()}
    return shapes


def payload_sizes(
    config: RunConfig, vocabulary_size: int | None
) -> dict[str, list[list[int]]] | None:
    """Bytes of one site's payloads, frames included, by codec, stage and piece.

    Summed over the shards of a stage. For every codec that the controller may choose; none where
    it does not look at the link. `vocabulary_size` as for `ModelPlan.of`. Raises `ModelError` and
    `ConfigError` as a rank would, and `ConfigError` where the controller goes by effective ranks
    and no matrix has one.
    """
    if config.control.adapt == "off":
        return None
    shapes = model_shapes(config, ModelPlan.of(config, vocabulary_size))
    if config.control.adapt == "effective-rank":
        _refuse_without_ranks(config, shapes)
        return None
    # Of `none` the controller reads how many values there are, whatever it may choose.
    return sizes_by_codec(config, shapes, list(dict.fromkeys(["none", *codecs(config)])))


def _refuse_without_ranks(config: RunConfig, stages: Sequence[Mapping[str, Shape]]) -> None:
    """Raise `ConfigError` if every matrix is so small that its low rank would not pay, so that the
    controller would wait for a measurement for ever."""
    codec = config.compression.codec
    fragments = itertools.chain.from_iterable(geometries(config, shapes) for shapes in stages)
    for geometry in itertools.chain.from_iterable(fragments):
        chosen = compressor(codec, geometry)
        if isinstance(chosen, LowRank) and chosen.matrices:
            return
    raise ConfigError(
        f'[compression] codec = "{codec}": low rank pays for no matrix of this model, all goes as '
        "int4 and no effective rank is measured; take a smaller rank, a quarter of the hidden size "
        'or less, or set control.adapt = "off"'
    )


def model_shapes(config: RunConfig, blueprint: ModelPlan) -> list[dict[str, Shape]]:
    """Whole shapes of what each stage exchanges, by full name in model order."""
    copy = None if blueprint.tied is None else blueprint.tied[1]
    stages = []
    for stage in range(config.site.stages):
        shapes = stage_shapes(config, blueprint, stage)
        # The copy of a tied tensor is set from its owner's, not exchanged.
        stages.append({name: shape for name, shape in shapes.items() if name != copy})
    return stages


def sizes_by_codec(
    config: RunConfig, stages: Sequence[Mapping[str, Shape]], names: Sequence[str]
) -> dict[str, list[list[int]]]:
    """Bytes of one site's payloads by codec of `names`, stage and piece, summed over shards.

    As rounds send them, moments included. `stages` as `model_shapes` gives them. Methods that
    exchange gradients have one piece.
    """
    sent = {codec: config.sent_as(codec) for codec in names}
    return {codec: [_stage_sizes(config, each, sent[codec]) for each in stages] for codec in names}


def _stage_sizes(config: RunConfig, shapes: Mapping[str, Shape], codec: str) -> list[int]:
    return [
        sum(message_bytes(codec, geometry) for geometry in fragment)
        for fragment in geometries(config, shapes)
    ]


def geometries(config: RunConfig, shapes: Mapping[str, Shape]) -> list[list[Geometry]]:
    """How a stage of these whole `shapes` lies in its ranks' buffers, by piece and shard."""
    shards = config.site.shards
    return [
        [Layout.of(local_shapes(shapes, names, shard, shards)).geometry for shard in range(shards)]
        for names in piece_names(config, shapes)
    ]


def piece_names(config: RunConfig, shapes: Mapping[str, Shape]) -> list[list[str]]:
    """Names of a stage's tensors of these whole `shapes`, by piece."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return split_pieces(sizes, 1 if config.exchanges_gradients else config.outer.fragments)


def factor_bytes(codec: str, geometry: Geometry) -> int:
    """Bytes of the factor that a rank sends to an exchange's owner, frame included, before what
    `message_bytes` counts; 0 for codecs that are not low-rank."""
    chosen = compressor(codec, geometry)
    return frame_bytes(chosen.factor_part) if isinstance(chosen, LowRank) else 0


def message_bytes(codec: str, geometry: Geometry) -> int:
    """Bytes that a rank sends to one other site in one exchange, frames included."""
    chosen = compressor(codec, geometry)
    if isinstance(chosen, LowRank):
        # The owner of a piece sends its basis besides: the most that any rank sends.
        return frame_bytes(chosen.basis_part) + frame_bytes(chosen.payload_part)
    return frame_bytes(chosen.part(0, geometry.length, 0))
