"""Sizes of payloads, computed from a model's shapes: bytes by codec, stage and piece.

The controller chooses among codecs by these numbers. They are computed once, in a process that
has torch and the model, and are given to the coordinator, which has neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from dilocox.compression import Geometry, compressor, frame_bytes
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.candidates import codecs
from dilocox.errors import ConfigError
from dilocox.inner import chunks_of_stage
from dilocox.models import ModelChunk
from dilocox.outer.layout import Layout, local_shapes, split_pieces
from dilocox.training.builder import ModelPlan

Shape = tuple[int, ...]


def chunks_to_read(config: RunConfig, blueprint: ModelPlan, stage: int) -> list[ModelChunk]:
    """Return the chunks of a stage, in order, on the meta device: names and shapes, no weights."""
    site = config.site
    indices = chunks_of_stage(site.schedule, site.stages, site.chunks, stage)
    return [blueprint.bare_chunks[index] for index in indices]


def stage_shapes(config: RunConfig, blueprint: ModelPlan, stage: int) -> dict[str, Shape]:
    """Return whole shapes of a stage's parameters by full name, in model order.

    These are the parameters that sites exchange: with adapters the trained ones, otherwise all.
    Without adapters, parameters that the model type itself freezes are part of the model's state,
    too. No weights are made.
    """
    shapes: dict[str, Shape] = {}
    for chunk in chunks_to_read(config, blueprint, stage):
        shapes |= {
            chunk.full_name(name): tuple(parameter.shape)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad or blueprint.adapter is None
        }
    return shapes


def payload_sizes(
    config: RunConfig, vocabulary_size: int | None
) -> dict[str, list[list[int]]] | None:
    """Return the bytes of one site's payloads, frames included, by codec, stage and piece.

    Bytes are summed over the shards of a stage. The result has every codec that the controller
    may choose. It is None unless the controller chooses codecs by the link. `vocabulary_size`: see
    `ModelPlan.of`.

    Raises `ModelError` and `ConfigError` as `ModelPlan.of` does. Raises `ConfigError` as well if
    the controller uses effective ranks and no matrix has one.
    """
    if config.control.adapt == "off":
        return None
    shapes = model_shapes(config, ModelPlan.of(config, vocabulary_size))
    if config.control.adapt == "effective-rank":
        _refuse_without_ranks(config, shapes)
        return None
    # The controller derives the number of values from the sizes of codec `none`: always include it.
    return sizes_by_codec(config, shapes, list(dict.fromkeys(["none", *codecs(config)])))


def _refuse_without_ranks(config: RunConfig, stages: Sequence[Mapping[str, Shape]]) -> None:
    """Raise `ConfigError` if the low-rank codec sends no matrix of the model in low rank.

    No effective rank would then be measured, and the controller would wait for one for ever.
    """
    codec = config.compression.codec
    fragments = itertools.chain.from_iterable(geometries(config, shapes) for shapes in stages)
    for geometry in itertools.chain.from_iterable(fragments):
        agreement = compressor(codec, geometry).agreement
        if agreement is not None and agreement.matrices:
            return
    raise ConfigError(
        f'[compression] codec = "{codec}": low rank pays for no matrix of this model, so all '
        "tensors are sent as int4 and no effective rank is measured; choose a rank of at most a "
        'quarter of the hidden size, or set control.adapt = "off"'
    )


def model_shapes(config: RunConfig, blueprint: ModelPlan) -> list[dict[str, Shape]]:
    """Return for each stage the whole shapes of its exchanged tensors, by full name.

    Names are in model order.
    """
    copy = None if blueprint.tied is None else blueprint.tied[1]
    stages = []
    for stage in range(config.site.stages):
        shapes = stage_shapes(config, blueprint, stage)
        # The copy of a tied tensor is set from the owner's tensor, and is not exchanged.
        stages.append({name: shape for name, shape in shapes.items() if name != copy})
    return stages


def sizes_by_codec(
    config: RunConfig, stages: Sequence[Mapping[str, Shape]], names: Sequence[str]
) -> dict[str, list[list[int]]]:
    """Return bytes of one site's payloads by codec of `names`, stage and piece.

    Bytes are summed over shards, and include moments if rounds send these. `stages`: the result
    of `model_shapes`. Methods that exchange gradients have one piece.
    """
    sent = {codec: config.sent_as(codec) for codec in names}
    return {codec: [_stage_sizes(config, each, sent[codec]) for each in stages] for codec in names}


def _stage_sizes(config: RunConfig, shapes: Mapping[str, Shape], codec: str) -> list[int]:
    return [
        sum(message_bytes(codec, geometry) for geometry in fragment)
        for fragment in geometries(config, shapes)
    ]


def geometries(config: RunConfig, shapes: Mapping[str, Shape]) -> list[list[Geometry]]:
    """Return the geometry of the ranks' buffers of a stage, by piece and shard.

    `shapes`: whole shapes of the stage's tensors by full name, in model order.
    """
    shards = config.site.shards
    return [
        [Layout.of(local_shapes(shapes, names, shard, shards)).geometry for shard in range(shards)]
        for names in piece_names(config, shapes)
    ]


def piece_names(config: RunConfig, shapes: Mapping[str, Shape]) -> list[list[str]]:
    """Return the names of a stage's tensors by piece. `shapes`: their whole shapes."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return split_pieces(sizes, config.outer.pieces)


def factor_bytes(codec: str, geometry: Geometry) -> int:
    """Return the bytes, frame included, of the factor that a rank sends to an exchange's owner.

    The factor is sent before the messages that `message_bytes` counts. 0 for a codec that is not
    low-rank.
    """
    return sum(frame_bytes(phase) for phase in compressor(codec, geometry).phases[:-2])


def message_bytes(codec: str, geometry: Geometry) -> int:
    """Return the bytes that a rank sends to one other site in one exchange, frames included.

    Factors of low rank are not included, see `factor_bytes`.
    """
    # The owner of a low-rank exchange also sends its basis, so this is the most that a rank sends.
    return sum(frame_bytes(phase) for phase in compressor(codec, geometry).phases[-2:])
