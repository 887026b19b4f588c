"""Tiny models with a byte-level tokenizer, of the types that GGUF files are written for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.base_model import write_base

OTHERS = "other positions"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    OTHERS: {
        "model_type": "llama",
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "qwen2": {"model_type": "qwen2"},
    # transformers' reader of GGUF takes Qwen3's own head size whatever the file says.
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False},
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
}
"""Settings of transformers by name of the model. All sizes are in `configuration`."""


def configuration(name: str, **keys: Any) -> Any:
    """Return the configuration of a tiny model."""
    from transformers import AutoConfig

    sizes = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    settings = {**sizes, **MODELS.get(name, {"model_type": name}), **keys}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def write_model(folder: Path, name: str, **keys: Any) -> Path:
    """Write a model with weights large enough that no two tokens are nearly as likely."""
    import torch
    from transformers import AutoModelForCausalLM

    write_base(folder)
    (folder / "model.safetensors").unlink()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(configuration(name, **keys))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder, max_shard_size="60KB")
    return folder
