"""Compare cut and whole on a tiny copy of the architecture before anything is trained."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from dilocox.errors import ModelError
from dilocox.models.architecture import one_line
from dilocox.models.chunk import build_chunk, sliced_config
from dilocox.models.materialise import materialise
from dilocox.models.meta_model import build_skeleton, tied_names
from dilocox.models.partition import ChunkSpec
from dilocox.models.weight_source import FreshWeights, preserved_generator

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYERS = 8
_VOCABULARY = 64
_LENGTH = 12
_WINDOW = 5
# Configuration key -> largest value in the tiny copy.
_WIDTHS = {
    "intermediate_size": 48,
    "ffn_dim": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def probe_cut(hf_config: PretrainedConfig, chunks: int, attention: str) -> None:
    """Refuse a model type whose logits change when it is cut.

    A tiny copy (same type, options and pattern of layer types; few layers, small widths) runs
    whole and cut on the CPU in fp32, with random values everywhere; the logits must be equal to
    the bit. Models that share state across layers, or scale their input on the way in, differ.
    So do models with a buffer that is neither stored nor set by their initialisation.

    `attention` that needs a GPU is replaced by "sdpa": the cut does not touch attention.
    Raises `ModelError` if the logits differ or the tiny copy does not run.
    """
    attention = attention if attention in ("sdpa", "eager") else "sdpa"
    ids = torch.randint(_VOCABULARY, (2, _LENGTH), generator=torch.Generator().manual_seed(0))
    # First, middle and last chunk are the only kinds there are.
    parts = min(chunks, hf_config.num_hidden_layers, 3)
    name = f'model type "{hf_config.model_type}"'
    try:
        tiny = tiny_config(hf_config)
        source = _ProbeWeights(tiny)
        whole = _run_whole(tiny, attention, source, ids)
        cut = _run_cut(tiny, parts, attention, source, ids)
    except ModelError:
        raise
    except Exception as error:  # modelling code may raise anything
        raise ModelError(
            f"{name}: a tiny copy of it does not run in {parts} chunks ({one_line(error)}); use "
            "another model type"
        ) from None
    if not bool(torch.isfinite(whole).all()):
        raise ModelError(f"{name}: a tiny copy of it gives non-finite logits; use another type")
    if not torch.equal(whole, cut):
        difference = (whole - cut).abs().max().item()
        raise ModelError(
            f"{name}: cut into {parts} chunks its logits differ from the whole model's by "
            f"{difference:.3g} (its layers share more than their input); set site.stages = 1, "
            "or use another model type"
        )


def probe_attention(hf_config: PretrainedConfig, attention: str) -> None:
    """Refuse an attention that the model type does not have, before its ranks find that out.

    Nothing is computed: the model is built on the meta device. "flash_attention_2" is left to its
    own check, since it needs a GPU. Raises `ModelError`.
    """
    if attention in ("sdpa", "eager"):
        build_skeleton(hf_config, attention=attention)


def probe_weights(hf_config: PretrainedConfig) -> None:
    """Refuse a model type whose code leaves a tensor unset, so that it cannot begin with fresh
    weights: Apertus sets some where a module is built, on the meta device here.

    All tensors of a tiny copy are initialised. A type that has no tiny copy is taken: its ranks
    will see. Raises `ModelError`.
    """
    try:
        tiny = tiny_config(hf_config)
        source, names = FreshWeights(tiny, seed=0), list(build_skeleton(tiny).state_dict())
    except Exception:  # modelling code may raise anything at widths that do not go together
        return
    for name in names:
        source.tensor(name)


def tiny_config(hf_config: PretrainedConfig) -> Any:
    """A copy of the configuration with few layers and small widths; the head size is kept."""
    tiny = copy.deepcopy(hf_config)
    layers = min(tiny.num_hidden_layers, _LAYERS)
    tiny = sliced_config(tiny, 0, layers)
    # Rotary sections and the like refer to the head size, so heads get fewer, not smaller.
    heads = tiny.num_attention_heads
    head_size = getattr(tiny, "head_dim", None) or tiny.hidden_size // heads
    groups = getattr(tiny, "num_key_value_heads", None) or heads
    tiny.num_attention_heads = min(heads, 2)
    if getattr(tiny, "num_key_value_heads", None):
        tiny.num_key_value_heads = 1 if groups < heads else tiny.num_attention_heads
    full_width = tiny.hidden_size
    tiny.hidden_size = tiny.num_attention_heads * head_size
    projected = getattr(tiny, "word_embed_proj_dim", None)
    if projected:
        tiny.word_embed_proj_dim = tiny.hidden_size // (1 if projected == full_width else 2)
    for key, largest in _WIDTHS.items():
        value = getattr(tiny, key, None)
        if isinstance(value, int):
            setattr(tiny, key, min(value, largest))
    if isinstance(getattr(tiny, "sliding_window", None), int):
        tiny.sliding_window = _WINDOW
    tiny.vocab_size = _VOCABULARY
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(tiny, key, None) is not None:
            setattr(tiny, key, 1)
    return tiny


class _ProbeWeights:
    """Random values for every tensor, the same for the same name."""

    def __init__(self, tiny: Any):
        model = build_skeleton(tiny)
        pair = tied_names(model)
        generator = torch.Generator().manual_seed(1)
        self.values: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            value = torch.empty(tensor.shape, dtype=tensor.dtype)
            if value.is_floating_point():
                value.uniform_(-0.1, 0.1, generator=generator)
                value += 1.0 if value.dim() < 2 else 0.0
            else:
                value.zero_()
            self.values[name] = value
        if pair is not None:
            self.values[pair[1]] = self.values[pair[0]]

    def tensor(self, full_name: str) -> torch.Tensor:
        return self.values[full_name]


def _run_whole(tiny: Any, attention: str, source: _ProbeWeights, ids: torch.Tensor) -> torch.Tensor:
    with preserved_generator():  # building off the meta device draws initial values
        model = build_skeleton(tiny, attention=attention, device="cpu")
    model.load_state_dict(source.values, strict=True)
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _run_cut(
    tiny: Any, parts: int, attention: str, source: _ProbeWeights, ids: torch.Tensor
) -> torch.Tensor:
    layers = tiny.num_hidden_layers
    x = ids
    for index in range(parts):
        spec = ChunkSpec(
            index=index,
            count=parts,
            first_layer=index * layers // parts,
            end_layer=(index + 1) * layers // parts,
            embeds=index == 0,
            head=index == parts - 1,
            parameters=0,
        )
        chunk = build_chunk(tiny, spec, attention=attention, activation_checkpointing=False)
        materialise(chunk, source, "cpu")
        chunk.eval()
        with torch.no_grad():
            x = chunk(x)
    return x
