"""Checks that the model can be trained in the run's layout. No check here needs text."""

from __future__ import annotations

import importlib.util
import math

from dilocox.config.run_config import RunConfig
from dilocox.data.manifest import MANIFEST
from dilocox.errors import ConfigError
from dilocox.models import (
    load_model_config,
    probe_attention,
    probe_cut,
    probe_packing,
    probe_weights,
)
from dilocox.models.adapter import check_peft
from dilocox.models.architecture import check_trained_loss
from dilocox.models.nf4 import check_bitsandbytes
from dilocox.models.transformers_internals import check as check_transformers
from dilocox.outer.layout import split_pieces
from dilocox.training.builder import ModelPlan
from dilocox.training.launch.cuda_driver import ranks_use_gpu
from dilocox.training.launch.tokenizer_check import tokenizer_size
from dilocox.training.payload_sizes import stage_shapes


def check_model(config: RunConfig, *, own_loop: bool = False) -> None:
    """Raise `ModelError` or `ConfigError` for a model that cannot be trained in this layout.

    Needs no text, whose preparation may take hours. A tokenizer that will be trained counts with
    `data.vocabulary_size` tokens. A tokenizer that will be loaded is loaded now. `own_loop`: a loop
    of the user's own computes the loss.
    """
    check_transformers()
    if config.adapter is not None:
        check_peft()
        if config.adapter.base == "nf4":
            check_bitsandbytes()
    _check_attention(config)
    known = config.data.trained_vocabulary
    blueprint = ModelPlan.of(config, known)
    if not own_loop:
        check_trained_loss(config.model, blueprint.hf_config)
    check_blueprint(config, blueprint)
    if config.model.path is None or not config.model.pretrained:
        probe_weights(blueprint.hf_config)
    unknown = known is None and not (config.data_folder / MANIFEST).exists()
    if unknown and config.data.tokenizer != "train":
        load_model_config(config.model, tokenizer_size(config.data.tokenizer))


def check_blueprint(config: RunConfig, blueprint: ModelPlan) -> list[int]:
    """Return each stage's trained parameters, after checking that the model fits the layout."""
    chunks = config.site.stages * config.site.chunks
    if chunks > 1:
        probe_cut(blueprint.hf_config, chunks, config.model.attention)
    else:
        probe_attention(blueprint.hf_config, config.model.attention)
    if config.data.rows.packing == "documents":
        probe_packing(blueprint.hf_config, chunks, config.model.attention)
    return [_stage_parameters(config, blueprint, stage) for stage in range(config.site.stages)]


def _stage_parameters(config: RunConfig, blueprint: ModelPlan, stage: int) -> int:
    """Return a stage's trained parameters, after checking that it can be divided into pieces."""
    shapes = stage_shapes(config, blueprint, stage)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    split_pieces(sizes, config.outer.pieces)
    return sum(sizes.values())


def _check_attention(config: RunConfig) -> None:
    """Raise `ConfigError` if attention lacks a GPU or package, which only ranks would find."""
    wanted = config.model.attention
    if wanted != "flash_attention_2":
        return
    if not ranks_use_gpu(config):
        raise ConfigError(
            f'model.attention: "{wanted}" needs a GPU, ranks here have none; use "sdpa"'
        )
    # Transformers takes flash attention from either of the two packages.
    if not any(importlib.util.find_spec(name) for name in ("flash_attn", "kernels")):
        raise ConfigError(
            f'model.attention: "{wanted}" needs the package flash-attn, which is not installed '
            'here; install it, or use "sdpa"'
        )
