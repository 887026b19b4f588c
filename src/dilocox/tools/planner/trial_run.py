"""A run cut to one rank, so that its steps can be timed on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.inner import ChunkSettings, SiteMesh, SiteModel
from dilocox.models import build_chunk, materialise, open_weights
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.step_time import OPTIMIZER_BYTES, orthonormalising_flops

NARROWED = (
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "word_embed_proj_dim",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Keys of a model's configuration that are divided to make the model narrower."""


def small_run() -> RunConfig:
    """Return the run to step if no run file is given: a Qwen3 of about 4M parameters."""
    return resolve_run(
        {
            "model": {
                "architecture": {
                    "model_type": "qwen3",
                    "hidden_size": 256,
                    "intermediate_size": 768,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 32,
                    "vocab_size": 4096,
                    "tie_word_embeddings": True,
                }
            },
            "site": {"batch_size": 4, "micro_batch_size": 4},
            "sites": {"here": {}},
        }
    )


_OF_A_STEP = ("run", "model", "site", "inner")
"""Sections of the run file on which the time of a step depends."""
_OF_A_VOCABULARY = ("tokenizer", "vocabulary_size", "own")
"""Keys of `[data]` on which the vocabulary's size depends."""


def alone(config: RunConfig, rows: int, length: int) -> dict[str, Any]:
    """Return the run file of `config`, changed to one rank and one micro-batch per step.

    A micro-batch has `rows` sequences of `length` tokens. Only what a step of the whole model
    depends on is kept. Other sections may name sites, or ask for text that is not read here.
    """
    whole = config.model_dump(mode="json", exclude_none=True)
    raw = {section: whole[section] for section in _OF_A_STEP}
    raw["site"] |= {
        "stages": 1,
        "shards": 1,
        "replicas": 1,
        "chunks": 1,
        "schedule": "1f1b",
        "micro_batch_size": rows,
        "batch_size": rows,
    }
    raw["data"] = {key: whole["data"][key] for key in _OF_A_VOCABULARY if key in whole["data"]}
    raw["data"]["sequence_length"] = length
    # Speeds are measured with the whole model in training, as tables of hardware are.
    raw["outer"] = {"steps": 1, "inner_steps": 1, "method": "diloco"}
    raw["sites"] = {"here": {}}
    return raw


def reshaped(
    raw: Mapping[str, Any], outline: ModelOutline, layers: int, vocabulary: int, factor: int = 1
) -> RunConfig:
    """Return the run of `raw` with a smaller model of the type of `outline`.

    Args:
        raw: The run file.
        outline: Outline of the original model.
        layers: Number of layers.
        vocabulary: Largest size of the vocabulary.
        factor: Divisor of the model's width.

    Raises:
        DilocoxError: The smaller model's configuration is not valid.
    """
    described, model = outline.hf_config.to_dict(), outline.config.model
    architecture = {
        "model_type": outline.hf_config.model_type,
        "num_hidden_layers": layers,
        "vocab_size": min(int(described["vocab_size"]), vocabulary),
    }
    for key in NARROWED:
        if isinstance(described.get(key), int):
            architecture[key] = max(1, described[key] // factor)
    for key in ("head_dim", "tie_word_embeddings"):
        if described.get(key) is not None:
            architecture[key] = described[key]
    shape = {
        "architecture": architecture,
        "attention": model.attention,
        "activation_checkpointing": model.activation_checkpointing,
        "compile": model.compile,
    }
    return resolve_run({**raw, "model": shape}, where="the model to calibrate with")


def split(one: float, several: float, count: int) -> tuple[float, float]:
    """Return (seconds of a micro-batch, seconds of the rest of a step).

    `one`, `several`: seconds of a step of one micro-batch, and of `count` micro-batches. The part
    that grows with micro-batches is computation, the rest is the optimizer. Noise may make the
    rest negative; it is then set to a hundredth of `one`.
    """
    each = min((several - one) / (count - 1), several / count)
    if not each > 0:
        each = one
    return each, max(one - each, one / 100)


def optimizer_rate(
    run: RunConfig, outline: ModelOutline, seconds: float, operations: float
) -> float:
    """Return the bytes per second that the inner optimizer reads and writes in `seconds`.

    `operations`: operations per second of Muon's matrix products. The cost model counts these
    products separately, so their time is taken off.
    """
    moved = OPTIMIZER_BYTES[run.inner.optimizer] * outline.parameters
    if run.inner.optimizer == "muon":
        products = sum(orthonormalising_flops(shapes) for shapes in outline.shapes)
        seconds = max(seconds - products / operations, seconds / 100)
    return moved / seconds


def named(precision: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`, such as `bfloat16`."""
    return str(precision).removeprefix("torch.")


def build_model(
    run: RunConfig,
    outline: ModelOutline,
    device: torch.device,
    precision: torch.dtype,
    compiled: bool = False,
) -> SiteModel:
    """Return the whole model of a run of one rank, with the weights that the run starts from.

    `compiled`: True: compile layers if `model.compile` says so; False: never compile.
    """
    flash = run.model.attention == "flash_attention_2"
    chunk = build_chunk(
        outline.hf_config,
        outline.blueprint.cut[0],
        attention="sdpa" if flash and device.type == "cpu" else run.model.attention,
        activation_checkpointing=run.model.activation_checkpointing,
    )
    source = open_weights(run.model, outline.hf_config, run.run.seed)
    return SiteModel(
        [chunk],
        lambda module, where: materialise(module, source, where),  # type: ignore[arg-type]
        SiteMesh.create(1, 1, device),
        run.site,
        run.inner,
        ChunkSettings(
            hidden_size=int(outline.hf_config.hidden_size),
            precision=precision,
            tied=outline.blueprint.tied,
            compile_layers=compiled and run.model.compile,
        ),
    )
