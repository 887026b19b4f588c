"""Outline of a run's model: the parameters of each stage, and the computation per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.errors import ModelError
from dilocox.inner import chunks_of_stage
from dilocox.inner.fsdp import Units
from dilocox.models import ChunkSpec, build_chunk
from dilocox.models.adapter import adapter_shapes, trained_shapes
from dilocox.models.meta_model import find_layout, skeleton_to_read
from dilocox.models.nf4 import linear_layers
from dilocox.outer.layout import layer_number
from dilocox.training.builder import ModelPlan
from dilocox.training.launch.tokenizer_check import check_trained_tokenizer, model_vocabulary
from dilocox.training.payload_sizes import Shape, model_shapes


@dataclass(frozen=True)
class ModelOutline:
    """A run's model, cut into stages, on the meta device: it has no weights."""

    config: RunConfig
    blueprint: ModelPlan

    @classmethod
    def of(cls, config: RunConfig) -> ModelOutline:
        """Return the outline of a run's model.

        The vocabulary has `data.vocabulary_size` tokens if the run trains its tokenizer. If the
        architecture gives no `vocab_size`, the tokenizer is loaded and its size is taken.

        Raises:
            ConfigError: The run trains a tokenizer, but the model has weights already.
            DataError: The tokenizer cannot be loaded.
            ModelError: The model cannot be trained, or not be cut into these stages.
        """
        check_trained_tokenizer(config)
        return cls(config, ModelPlan.of(config, model_vocabulary(config)))

    @cached_property
    def stages(self) -> list[list[ChunkSpec]]:
        """Chunks of each stage, in model order."""
        site = self.config.site
        return [
            [
                self.blueprint.cut[index]
                for index in chunks_of_stage(site.schedule, site.stages, site.chunks, stage)
            ]
            for stage in range(site.stages)
        ]

    @cached_property
    def whole(self) -> dict[str, Shape]:
        """Shapes of all trained parameters by full name. Tied parameters occur once."""
        if self.blueprint.adapter is not None:
            found = trained_shapes(self.hf_config, self.blueprint.adapter)
            return {name: tuple(shape) for name, shape in found.items()}
        return self._base

    @cached_property
    def _fixed(self) -> dict[int, int]:
        """Number of adapters' parameters that keep their first values, by layer number."""
        adapter = self.blueprint.adapter
        if adapter is None or not adapter.freeze_a:
            return {}
        every = adapter_shapes(self.hf_config, adapter)
        return _by_layer({n: tuple(s) for n, s in every.items() if n not in self.whole})

    @cached_property
    def _base(self) -> dict[str, Shape]:
        """Shapes of the parameters of the model without adapters, by full name."""
        model = skeleton_to_read(self.hf_config)
        return {name: tuple(each.shape) for name, each in model.named_parameters()}

    @cached_property
    def shapes(self) -> list[dict[str, Shape]]:
        """Unsharded shapes of the tensors that each stage exchanges, by full name in model order.

        Raises `ModelError` unless every parameter is in exactly one stage.
        """
        shapes = model_shapes(self.config, self.blueprint)
        check_cut(shapes, self.whole)
        return shapes

    @property
    def parameters(self) -> int:
        """Number of trained parameters. Tied parameters count once."""
        return sum(map(math.prod, self.whole.values()))

    @property
    def frozen(self) -> int:
        """Number of parameters that a run with adapters only reads; 0 without adapters."""
        if self.blueprint.adapter is None:
            return 0
        return sum(map(math.prod, self._base.values())) + sum(self._fixed.values())

    @property
    def read(self) -> int:
        """Number of parameters that a run with adapters only reads, without those in NF4."""
        return self.frozen - sum(self._packed.values())

    @property
    def adapter_layer(self) -> int:
        """Number of adapters' parameters of the largest layer; 0 without adapters."""
        return 0 if self.blueprint.adapter is None else max(_by_layer(self.whole).values())

    @property
    def read_layer(self) -> int:
        """Number of parameters of the largest layer that are only read, without those in NF4.

        It is 0 without adapters.
        """
        if self.blueprint.adapter is None:
            return 0
        return max(
            count + self._fixed.get(layer, 0) - self._packed.get(layer, 0)
            for layer, count in self._layers.items()
        )

    @property
    def read_inside_layers(self) -> int:
        """Number of parameters inside layers that are only read, without those in NF4.

        It is 0 without adapters.
        """
        if not self.frozen:
            return 0
        return self.inside_layers + sum(self._fixed.values()) - sum(self._packed.values())

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of the largest layer, without adapters."""
        return max(self._layers.values(), default=0)

    @property
    def inside_layers(self) -> int:
        """Number of parameters inside layers, without adapters.

        Embedding and head, for example, are outside.
        """
        return sum(self._layers.values())

    @cached_property
    def outer_units(self) -> tuple[int, int]:
        """(parameters of the embedding, parameters of final norm and head), as FSDP units.

        They are the units of a model of one chunk; 0 if a module has no unit of its own.
        """
        spec = ChunkSpec(0, 1, 0, 1, embeds=True, head=True, parameters=0)
        attention = "eager" if self.config.model.attention == "eager" else "sdpa"
        chunk = build_chunk(
            self.hf_config, spec, attention=attention, activation_checkpointing=False
        )
        units = Units.of(chunk)
        of_closing = {each for module in units.closing for each in module.parameters()}
        embedding = set() if units.embedding is None else set(units.embedding.parameters())
        return sum(p.numel() for p in embedding), sum(p.numel() for p in of_closing)

    @cached_property
    def _layers(self) -> dict[int, int]:
        """Number of parameters by layer number, without adapters."""
        return _by_layer(self._base)

    @property
    def hf_config(self) -> Any:
        """The model's Hugging Face configuration."""
        return self.blueprint.hf_config

    @property
    def stage_parameters(self) -> list[int]:
        """Number of trained parameters of each stage.

        A tied tensor counts at every stage with a copy.
        """
        return [sum(chunk.trained for chunk in chunks) for chunks in self.stages]

    @property
    def stage_frozen(self) -> list[int]:
        """Number of frozen parameters of each stage; 0 without adapters."""
        return [sum(chunk.frozen for chunk in chunks) for chunks in self.stages]

    def stage_frozen_bytes(self, width: int) -> list[int]:
        """Return the bytes of each stage's frozen parameters, without those in NF4.

        `width`: bytes of the compute dtype.
        """
        return [sum(chunk.frozen_bytes(width) for chunk in chunks) for chunks in self.stages]

    @property
    def stage_packed_bytes(self) -> list[int]:
        """Bytes of each stage's parameters in NF4, which every shard holds."""
        return [sum(chunk.packed_bytes for chunk in chunks) for chunks in self.stages]

    @property
    def unpacked(self) -> int:
        """Number of values of the largest weight that is kept in NF4; 0 if there is none."""
        return max(self._packed_weights.values(), default=0)

    @property
    def _packed(self) -> dict[int, int]:
        """Number of parameters that are kept in NF4, by layer number."""
        return _by_layer({name: (size,) for name, size in self._packed_weights.items()})

    @cached_property
    def _packed_weights(self) -> dict[str, int]:
        """Number of values of each weight that is kept in NF4, by full name."""
        adapter = self.blueprint.adapter
        if adapter is None or adapter.base == "full":
            return {}
        model = skeleton_to_read(self.hf_config)
        layout = find_layout(model)
        path = f"{layout.body}.{layout.layers}"
        layers = linear_layers(model.get_submodule(path))
        return {f"{path}.{name}.weight": each.weight.numel() for name, each in layers}

    @property
    def compute(self) -> float:
        """Multiply-adds per token of a forward pass, attention included."""
        return sum(chunk.compute for chunk in self.blueprint.cut)

    @property
    def flops_per_token(self) -> float:
        """Operations per token of a training step, without recomputation.

        They are two per multiply-add of three forward passes.
        """
        return self.blueprint.flops_per_token

    def head_compute(self, chunk: ChunkSpec) -> float:
        """Return the multiply-adds per token of the head in `chunk`; 0 if it has no head."""
        return float(self.hf_config.hidden_size * self.hf_config.vocab_size) if chunk.head else 0.0


def _by_layer(shapes: Mapping[str, Shape]) -> dict[int, int]:
    """Return the number of values by layer number."""
    sizes: dict[int, int] = {}
    for name, shape in shapes.items():
        number = layer_number(name)
        if number is not None:
            sizes[number] = sizes.get(number, 0) + math.prod(shape)
    return sizes


def check_cut(stages: Sequence[Mapping[str, Shape]], whole: Mapping[str, Shape]) -> None:
    """Raise `ModelError` unless every parameter of `whole` is in exactly one of `stages`.

    Both are shapes by full name. The sums of parameters are then equal, too.
    """
    found: dict[str, int] = {}
    for number, shapes in enumerate(stages):
        for name, shape in shapes.items():
            if name in found:
                raise ModelError(f"{name} is in stage {found[name]} and in stage {number}")
            if whole.get(name) != shape:
                raise ModelError(
                    f"stage {number}: {name} of shape {list(shape)} is not the model's "
                    f"{list(whole[name]) if name in whole else 'at all'}"
                )
            found[name] = number
    missing = [name for name in whole if name not in found]
    if missing:
        raise ModelError(f"{missing[0]} is in no stage ({len(missing)} such parameters)")
