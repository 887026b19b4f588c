"""Checks with a tiny copy of a model, before training, that its type can be cut and initialised."""

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
_DOCUMENTS = ((7, 1, 4), (3, 9))
"""Lengths of the documents of each row."""
_EQUAL = 1e-4
"""Largest difference, as a share of the largest logit, that rounding can explain."""
# Largest value of each configuration key in the tiny copy.
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
    """Raise `ModelError` if the logits of a model type change when it is cut into chunks.

    The check uses a tiny copy of the model: same type, options and pattern of layer types, but few
    layers and small widths. The copy has random values and runs on the CPU in fp32, whole and cut.
    The logits must be equal to the bit. They differ if a model shares state across layers, scales
    its input, or has a buffer that is neither stored nor set by its initialisation.

    An `attention` that needs a GPU is replaced by "sdpa", since the cut does not change attention.
    `ModelError` is also raised if the tiny copy does not run.
    """
    attention = attention if attention in ("sdpa", "eager") else "sdpa"
    ids = torch.randint(_VOCABULARY, (2, _LENGTH), generator=torch.Generator().manual_seed(0))
    # Three chunks are enough: a chunk is the first, a middle or the last one.
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
            f"{difference:.3g} (its layers share state beside their input); set site.stages = 1, "
            "or use another model type"
        )


def probe_packing(hf_config: PretrainedConfig, chunks: int, attention: str) -> None:
    """Raise `ModelError` if documents of one row see each other in a model type.

    A tiny copy of the model, cut into `chunks`, computes packed rows. Each document's logits must
    be those that the whole copy gives for this document alone. The logits differ if a layer has a
    state or a convolution that runs along the row, or if positions do not restart. The copy runs on
    the CPU in fp32; see `probe_cut`.
    """
    attention = attention if attention in ("sdpa", "eager") else "sdpa"
    parts = min(chunks, hf_config.num_hidden_layers, 3)
    name = f'model type "{hf_config.model_type}"'
    rest = 'set data.packing to "none" (one document per row) or "stream", or use another type'
    ids = torch.randint(_VOCABULARY, (2, _LENGTH), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for row in _DOCUMENTS for length in row])
    try:
        tiny = tiny_config(hf_config)
        source = _ProbeWeights(tiny)
        packed = _run_cut(tiny, parts, attention, source, ids, positions.view(2, _LENGTH))
        alone = []
        for row, lengths in zip(ids, _DOCUMENTS, strict=True):
            documents = row.split(list(lengths))
            alone += [_run_whole(tiny, attention, source, each.unsqueeze(0)) for each in documents]
    except ModelError:
        raise
    except Exception as error:  # modelling code may raise anything
        raise ModelError(
            f'data.packing: "documents" cannot be used with {name}: a tiny copy of it does not '
            f"take packed rows ({one_line(error)}); {rest}"
        ) from None
    wanted = torch.cat(alone, dim=1).view_as(packed)
    difference = float((packed - wanted).abs().max() / wanted.abs().max())
    if not difference < _EQUAL:
        raise ModelError(
            f'data.packing: "documents" cannot be used with {name}: documents of one row see each '
            f"other there (logits differ by {difference:.2g}); {rest}"
        )


def probe_attention(hf_config: PretrainedConfig, attention: str) -> None:
    """Raise `ModelError` if the model type does not support `attention`.

    The model is built on the meta device, and nothing is computed. "flash_attention_2" is not
    checked here, since its own check needs a GPU.
    """
    if attention in ("sdpa", "eager"):
        build_skeleton(hf_config, attention=attention)


def probe_weights(hf_config: PretrainedConfig) -> None:
    """Raise `ModelError` if the code of a model type does not initialise all its tensors.

    Such a type cannot start with fresh weights. For example, Apertus sets some values when a module
    is built, which happens on the meta device here. The check initialises all tensors of a tiny
    copy. A type of which no tiny copy can be built passes; its ranks then check it at their start.
    """
    try:
        tiny = tiny_config(hf_config)
        source, names = FreshWeights(tiny, seed=0), list(build_skeleton(tiny).state_dict())
    except Exception:  # modelling code may raise anything if the small widths do not fit together
        return
    for name in names:
        source.tensor(name)


def tiny_config(hf_config: PretrainedConfig) -> Any:
    """Returns a copy of the configuration with few layers and small widths, but its head size."""
    tiny = copy.deepcopy(hf_config)
    layers = min(tiny.num_hidden_layers, _LAYERS)
    tiny = sliced_config(tiny, 0, layers)
    # Rotary sections and other settings refer to the head size, so the copy has fewer heads of the
    # same size.
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
    """Random values for every tensor; the whole and the cut model get the same values."""

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
    with preserved_generator():  # building a model on the CPU draws random initial values
        model = build_skeleton(tiny, attention=attention, device="cpu")
    model.load_state_dict(source.values, strict=True)
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _run_cut(
    tiny: Any,
    parts: int,
    attention: str,
    source: _ProbeWeights,
    ids: torch.Tensor,
    positions: torch.Tensor | None = None,
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
            x = chunk(x, positions=positions)
    return x
