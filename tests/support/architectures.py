"""Small configurations of every type that the cut is shown for, and helpers to build them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilocox.config.run_config import ModelSection
from dilocox.models import (
    ModelChunk,
    WeightSource,
    build_chunk,
    load_model_config,
    materialise,
    plan_cut,
)
from dilocox.models.activation_checkpointing import Checkpointing

VOCABULARY = 96
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GATED = {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", **_GATED},
    "qwen3": {"model_type": "qwen3", **_GATED, "head_dim": 8},
    "llama": {"model_type": "llama", **_GATED},
    "mistral": {"model_type": "mistral", **_GATED, "sliding_window": 5},
    "olmo2": {"model_type": "olmo2", **_GATED},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_GATED,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        "final_logit_softcapping": 3.0,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_SMALL, "intermediate_size": 48},
    "phi3": {"model_type": "phi3", **_GATED},
    "opt": {"model_type": "opt", **_SMALL, "ffn_dim": 48, "dropout": 0.0},
    "opt-projected": {
        "model_type": "opt",
        **_SMALL,
        "ffn_dim": 48,
        "dropout": 0.0,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
    },
    "granite": {"model_type": "granite", **_GATED, "embedding_multiplier": 3.0},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_GATED,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
ROUTED = {
    "model_type": "glm4_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
"""A model that saves buffers beside its parameters: the biases of its routers."""
ROUTED_IN_FP32 = {
    "model_type": "ernie4_5_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 1,
    "moe_k": 2,
    "moe_layer_start_index": 1,
    "tie_word_embeddings": False,
}
"""A model whose routers are parameters in fp32: trained weights, and biases that are frozen."""
BIASED = {
    "model_type": "deepseek_v3",
    **{key: size for key, size in ROUTED.items() if key not in ("model_type", "head_dim")},
    "num_key_value_heads": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""A model with the buffers of `ROUTED`, which takes their dtype from its parameters."""
BUFFERS = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]


def section(name: str, **keys: Any) -> ModelSection:
    return ModelSection(architecture={**ARCHITECTURES[name], **keys})


def small_config(name: str, **keys: Any) -> Any:
    return load_model_config(section(name, **keys), VOCABULARY)


def reference_model(config: Any, seed: int = 0, attention: str = "sdpa") -> nn.Module:
    """The unsplit model with every parameter random, norms and biases included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1:
                parameter += 1.0
    return model.eval()


class StateSource:
    """A model's state dict as a weight source."""

    def __init__(self, model: nn.Module):
        self.state = {name: t.detach().clone() for name, t in model.state_dict().items()}
        self.asked: list[str] = []

    def tensor(self, full_name: str) -> torch.Tensor:
        self.asked.append(full_name)
        return self.state[full_name]


def cut_model(
    config: Any,
    chunks: int,
    source: WeightSource,
    attention: str = "sdpa",
    activation_checkpointing: Checkpointing = False,
) -> list[ModelChunk]:
    made = []
    for spec in plan_cut(config, chunks, 16):
        chunk = build_chunk(
            config, spec, attention=attention, activation_checkpointing=activation_checkpointing
        )
        assert all(p.is_meta for p in chunk.parameters())
        materialise(chunk, source, "cpu")
        made.append(chunk)
    return made


def chunk_of(config: Any, attention: str = "sdpa") -> ModelChunk:
    """The whole model as one chunk, on the meta device."""
    (spec,) = plan_cut(config, 1, 16)
    return build_chunk(config, spec, attention=attention, activation_checkpointing=False)


def run(chunks: list[ModelChunk], ids: torch.Tensor) -> torch.Tensor:
    x = ids
    for chunk in chunks:
        x = chunk(x)
    return x


def token_ids(batch: int = 2, length: int = 12, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)
