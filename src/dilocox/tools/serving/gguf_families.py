"""What a GGUF file says of a model, by model type: header, and tensors as llama.cpp wants them.

Pure functions. GGUF's keys and tensor layouts are those of llama.cpp, which the package gguf names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dilocox.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Array = npt.NDArray[np.float32]
Header = dict[str, int | float]
"""GGUF keys without the architecture's name, such as `attention.head_count`, with their values."""

OTHER_WAY = "convert the folder with llama.cpp's convert_hf_to_gguf.py"


@dataclass(frozen=True)
class Family:
    """How models of one type are written."""

    architecture: str
    """The architecture's name in GGUF."""
    rotates_pairs: bool = False
    """Whether llama.cpp rotates neighbouring elements of a head, not the two halves of a head."""
    more: Callable[[PretrainedConfig], Header] = lambda config: {}
    """Returns further keys of the header."""


def _granite(config: PretrainedConfig) -> Header:
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", rotates_pairs=True),
    "mistral": Family("llama", rotates_pairs=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "olmo2": Family("olmo2"),
    "granite": Family("granite", rotates_pairs=True, more=_granite),
}
"""Families by `model_type` of transformers."""


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a model. Raises `ConfigError` for a model that cannot be written."""
    found = FAMILIES.get(config.model_type)
    if found is None:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"model type {config.model_type}: dilocox writes GGUF for {known}; {OTHER_WAY}"
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ConfigError(
            f"hidden_act {config.hidden_act!r}: llama.cpp computes these models with silu; "
            f"{OTHER_WAY}"
        )
    kind = _rope(config).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"rope_type {kind!r}: dilocox writes GGUF for models with default and llama3 positions "
            f"alone; {OTHER_WAY}"
        )
    return found


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def head_size(config: PretrainedConfig) -> int:
    """Return the number of elements of an attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def context_length(config: PretrainedConfig) -> int:
    """Return the number of tokens that the model can read.

    A model with a sliding window gets the window's length, since llama.cpp knows no window for
    these families: up to that length both compute the same.
    """
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", config.model_type == "mistral")
    longest = int(config.max_position_embeddings)
    return min(longest, int(window)) if window and used else longest


def header(config: PretrainedConfig) -> Header:
    """Return the keys of the header with their values. Raises `ConfigError` as `family_of`."""
    family = family_of(config)
    size = head_size(config)
    return {
        "context_length": context_length(config),
        "embedding_length": int(config.hidden_size),
        "block_count": int(config.num_hidden_layers),
        "feed_forward_length": int(config.intermediate_size),
        "attention.head_count": int(config.num_attention_heads),
        "attention.head_count_kv": int(config.num_key_value_heads),
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": size,
        "rope.freq_base": float(_rope(config).get("rope_theta", 10_000.0)),
        "vocab_size": int(config.vocab_size),
        **family.more(config),
    }


def rotation_factors(config: PretrainedConfig) -> Array | None:
    """Return what each rotation's frequency is divided by: shape [head size / 2], float32.

    None for models with default positions. Source: the model card of Llama 3.1, as in
    transformers' `modeling_rope_utils`.
    """
    rope = _rope(config)
    if rope.get("rope_type", "default") != "llama3":
        return None
    size = head_size(config)
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    longest, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (longest / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    slow, fast = wavelengths > longest / low, wavelengths < longest / high
    return np.where(slow, factor, np.where(fast, 1.0, between)).astype(np.float32)


def converted(name: str, tensor: Array, config: PretrainedConfig) -> Array:
    """Return a tensor of a checkpoint as llama.cpp wants it, in the same shape.

    `name`: the tensor's name in the checkpoint. Only weights and biases of queries and keys differ:
    transformers rotates the two halves of a head, and llama.cpp, for some families, neighbours.
    """
    if not family_of(config).rotates_pairs:
        return tensor
    if ".q_proj." in name:
        return _paired(tensor, int(config.num_attention_heads))
    if ".k_proj." in name:
        return _paired(tensor, int(config.num_key_value_heads))
    return tensor


def _paired(tensor: Array, heads: int) -> Array:
    """Return the rows of each head in the order 0, n/2, 1, n/2 + 1, ... of its n rows."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
