"""A run's model before any weight is loaded: configuration, cut and adapters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dilocox.config.adapter import AdapterSection
from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError
from dilocox.models import (
    ChunkSpec,
    ModelChunk,
    WeightSource,
    bare_chunks,
    count_parameters,
    load_model_config,
    open_weights,
    plan_cut,
    tied_pair,
)
from dilocox.models.adapter_weights import AdapterWeights


@dataclass(frozen=True)
class ModelPlan:
    """The model's structure, known before any weight is loaded.

    It is the same at every rank of a run.
    """

    hf_config: Any
    cut: tuple[ChunkSpec, ...]
    tied: tuple[str, str] | None
    """Full names (owner, copy) of a tensor that is trained once and used twice."""
    adapter: AdapterSection | None = None
    """Adapters, without which all parameters are trained."""

    @classmethod
    def of(cls, config: RunConfig, vocabulary_size: int | None) -> ModelPlan:
        """Return the plan of the model that `config` names.

        `vocabulary_size`: number of tokens of the tokenizer; may be None. Raises `ModelError` if
        the model cannot be trained or divided into chunks. Raises `ConfigError` if sequences are
        too long for the model, or if the model cannot have the adapters of the run file.
        """
        hf_config = load_model_config(config.model, vocabulary_size)
        positions = getattr(hf_config, "max_position_embeddings", None)
        if positions is not None and config.data.sequence_length > positions:
            raise ConfigError(
                f"data.sequence_length {config.data.sequence_length} is above the model's "
                f"max_position_embeddings {positions}: lower it to at most {positions}, or raise "
                "max_position_embeddings in model.architecture"
            )
        chunks = config.site.stages * config.site.chunks
        cut = plan_cut(hf_config, chunks, config.data.sequence_length, config.adapter)
        # A frozen tensor is read from the same source at both places.
        tied = tied_pair(hf_config) if config.adapter is None else None
        return cls(hf_config, cut, tied, config.adapter)

    @cached_property
    def bare_chunks(self) -> list[ModelChunk]:
        """All chunks, for names and shapes alone. Raises the errors of `bare_chunks`."""
        return bare_chunks(self.hf_config, self.cut, self.adapter)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model, adapters included; tied parameters count once."""
        adapters = 0 if self.adapter is None else self.trained + self._fixed
        return count_parameters(self.hf_config) + adapters

    @property
    def trained(self) -> int:
        """Number of parameters that are trained and exchanged."""
        if self.adapter is None:
            return count_parameters(self.hf_config)
        return sum(chunk.trained for chunk in self.cut)

    @property
    def _fixed(self) -> int:
        """Number of parameters of adapters that keep their first values."""
        return sum(chunk.fixed for chunk in self.cut)

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of training per token, without recomputation.

        A multiply-add counts as two operations. Forward and backward pass cost as much as three
        forward passes. Frozen weights get no gradients, so with adapters it is two.
        """
        passes = 3 if self.adapter is None else 2
        frozen = sum(chunk.compute for chunk in self.cut) + self._fixed
        return 2 * (passes * frozen + (0 if self.adapter is None else 3 * self.trained))

    def weights(self, config: RunConfig) -> WeightSource:
        """Return the source of the run's first weights. Raises `ModelError`."""
        source = open_weights(config.model, self.hf_config, config.run.seed)
        if self.adapter is None:
            return source
        named = self.adapter.stored
        stored = None if named is None else Path(named).expanduser()
        return AdapterWeights(self.hf_config, self.adapter, config.run.seed, source, stored)
