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
from dilocox.models.nf4 import check_bitsandbytes
from dilocox.models.router_loss import asks_for_router_loss, probe_router_loss
from dilocox.models.start_adapters import check_start_adapters
from dilocox.models.transformers_internals import check as check_transformers
from dilocox.outer.layout import split_pieces
from dilocox.training.builder import ModelPlan
from dilocox.training.launch.cuda_driver import ranks_use_gpu
from dilocox.training.launch.tokenizer_check import tokenizer_size
from dilocox.training.payload_sizes import stage_shapes


def check_model(config: RunConfig, *, own_loop: bool = False, own_loss: bool = False) -> None:
    """Raise `ModelError` or `ConfigError` for a model that cannot be trained in this layout.

    Needs no text, whose preparation may take hours. A tokenizer that will be trained counts with
    `data.vocabulary_size` tokens. A tokenizer that will be loaded is loaded now. `own_loop`: a loop
    of the user's own computes the loss. `own_loss`: the run has a loss of the user's own.
    """
    check_transformers()
    if config.adapter is not None:
        check_peft()
        if config.adapter.base == "nf4":
            check_bitsandbytes()
    _check_attention(config)
    known = config.data.trained_vocabulary
    blueprint = ModelPlan.of(config, known)
    if asks_for_router_loss(blueprint.hf_config) and not own_loop:
        probe_router_loss(blueprint.hf_config)
        _check_router_loss(config, own_loss)
    check_blueprint(config, blueprint)
    check_first_adapters(config)
    if config.model.path is None or not config.model.pretrained:
        probe_weights(blueprint.hf_config)
    unknown = known is None and not (config.data_folder / MANIFEST).exists()
    if unknown and config.data.tokenizer != "train":
        load_model_config(config.model, tokenizer_size(config.data.tokenizer))


def check_first_adapters(config: RunConfig) -> None:
    """Check the adapters that the run starts from; does nothing if it names none.

    Raises `ConfigError` if they are not those of the run, and `ModelError` if they cannot be read.
    """
    if config.adapter is None or config.adapter.path is None:
        return
    hf_config = ModelPlan.of(config, config.data.trained_vocabulary).hf_config
    check_start_adapters(config.adapter.path, hf_config, config.adapter)


def _check_router_loss(config: RunConfig, own_loss: bool) -> None:
    """Raise `ConfigError` if a run cannot train with its model's load-balancing loss."""
    asked = "output_router_logits = true asks for a load-balancing loss, "
    if own_loss or config.data.format == "preference":
        raise ConfigError(
            f"{asked}which is added to the built-in loss of text alone; set it to false in the "
            "model's configuration"
        )
    if config.site.stages > 1:
        raise ConfigError(
            f"{asked}which depends on the routers of all layers: set site.stages = 1, or set it to "
            "false in the model's configuration"
        )
    compiled = config.model.compile
    if compiled is True or (compiled == "auto" and ranks_use_gpu(config)):
        raise ConfigError(
            f"{asked}and compiled layers do not record what it needs: set model.compile = false"
        )


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
