"""Turns `[model]` of the run file into a Hugging Face configuration that can be cut and trained.

This module reads only configurations; it loads no weights and no modelling code.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.utils.adapter_files import is_adapter_folder
from dilocox.utils.file_errors import names_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Keys that model types use without declaring them. Modelling code looks `head_dim` up; the other
# keys come from older checkpoints and are converted to `rope_parameters`.
_UNDECLARED_KEYS = (
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_pct",
)
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def load_model_config(model: ModelSection, vocabulary_size: int | None) -> PretrainedConfig:
    """Returns the checked configuration that `[model]` names, with `use_cache` off.

    `vocabulary_size` is the size of the tokenizer; None if the size is not known yet. This size is
    the default of `vocab_size` for an inline architecture. With None, the default of the model type
    stays.

    Special token ids that an inline architecture does not set become None. The defaults of the type
    belong to another tokenizer, and a padding id would freeze its row of the embedding. With `path`
    and `pretrained = false`, the ids become None too, and the generation settings are not
    published, since both belong to the weights that are not loaded.

    Raises `ModelError`, which gives the reason and the remedy, if the configuration cannot be used.
    """
    if model.own:
        raise ModelError(
            "model.own: the model is known to the sites' own programs alone (dilocox.site); name "
            "model.path or model.architecture for this, or load the tensors by your own code"
        )
    if model.architecture is not None:
        name = f'model.architecture (model_type "{model.architecture.get("model_type")}")'
        config = _inline(model.architecture, vocabulary_size)
    else:
        name = f"model.path {model.path}"
        config = _from_path(str(model.path), model.revision)
        if not model.pretrained:
            _forget_token_ids(config, given=())
            config._name_or_path = ""  # else the export would find and publish its settings
    config.use_cache = False
    _check_kind(config, name)
    if vocabulary_size is not None and vocabulary_size > config.vocab_size:
        raise ModelError(
            f"{name}: the tokenizer has {vocabulary_size} tokens, the model's vocabulary "
            f"{config.vocab_size}: {_room_for(model, vocabulary_size, config.vocab_size)}"
        )
    return config


def _room_for(model: ModelSection, tokens: int, rows: int) -> str:
    """Returns the remedy for a vocabulary of `rows` rows that is too small for `tokens` tokens."""
    if model.architecture is not None:
        return (
            "use the model's own tokenizer, lower data.vocabulary_size, or give the architecture "
            f"vocab_size = {tokens}"
        )
    # Fine-tuned models often have a padding token for which the embedding has no row.
    return (
        "use the model's own tokenizer; if this is already the model's own tokenizer, remove the "
        f"added tokens with ids of {rows} or more from its tokenizer.json, or add rows to the "
        f"model once with transformers: resize_token_embeddings({tokens}), then save_pretrained"
    )


def one_line(error: BaseException) -> str:
    """Returns the text of `error` as one line of at most 300 characters, for use in a message."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _from_path(path: str, revision: str | None) -> PretrainedConfig:
    from transformers import AutoConfig

    place = os.path.expanduser(path)
    if names_folder(path) and not os.path.isfile(place):
        try:
            with open(os.path.join(place, "config.json"), "rb"):
                pass
        except OSError as error:  # transformers would take the folder for a name on the hub
            if is_adapter_folder(Path(place)):
                raise ModelError(
                    f"model.path {path}: holds adapters, not a model; merge them into their base "
                    "model (dilocox export --merge, or merge_and_unload of peft) and name the "
                    "merged model; or, to go on training the adapters, name them in adapter.path "
                    "and their base model in model.path"
                ) from None
            raise _unusable(path, error.strerror or str(error)) from None
    try:
        # Code that comes with a model is never run. With False, transformers does not ask the user
        # for permission to run it either.
        return AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of errors here
        raise _unusable(path, one_line(error)) from None


def _unusable(path: str, reason: str) -> ModelError:
    return ModelError(
        f"model.path {path}: no usable configuration there ({reason}); give a folder with a "
        "config.json, or a hub name that this machine can reach"
    )


def _inline(architecture: dict[str, Any], vocabulary_size: int | None) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING

    keys = dict(architecture)
    model_type = keys.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f'model.architecture.model_type: no model type "{model_type}" in transformers'
            f"{_nearest(str(model_type), CONFIG_MAPPING.keys())}"
        )
    kind = CONFIG_MAPPING[model_type]
    valid = _valid_keys(kind)
    for key in keys:
        if key not in valid:
            raise ModelError(
                f'model.architecture.{key}: "{model_type}" has no such key{_nearest(key, valid)}'
            )
    if vocabulary_size is not None:
        keys.setdefault("vocab_size", vocabulary_size)
    try:
        config = kind(**keys)
    except Exception as error:  # a configuration class may raise anything at bad values
        raise ModelError(
            f'model.architecture: "{model_type}" refuses these values: {one_line(error)}'
        ) from None
    _forget_token_ids(config, given=keys)
    return config


def _forget_token_ids(config: PretrainedConfig, given: Container[str]) -> None:
    """Set the special token ids to None, except those in `given`."""
    for key in _TOKEN_IDS:
        # Some types do not accept None; their id stays.
        if key not in given and hasattr(config, key):
            with suppress(Exception):
                setattr(config, key, None)


def _valid_keys(kind: type) -> set[str]:
    """Returns the keys that configurations of `kind` accept: fields, aliases, undeclared keys."""
    fields = set(getattr(kind, "__dataclass_fields__", {}))
    return {*fields, *getattr(kind, "attribute_map", {}), *_UNDECLARED_KEYS}


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f'; did you mean "{near[0]}"?' if near else ""


def _check_kind(config: PretrainedConfig, name: str) -> None:
    """Raise `ModelError` unless `config` is of a decoder-only text model that can be cut."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.model_type
    text = config.get_text_config()
    if text is not config:
        raise ModelError(
            f'{name}: type "{kind}" holds more than a text model; save its text part alone and '
            f'use this part (model_type "{text.model_type}")'
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.is_encoder_decoder:
        raise ModelError(
            f'{name}: type "{kind}" is not a causal language model; use one such as "llama", '
            '"qwen3" or "olmo2"'
        )
    if not getattr(config, "base_model_pp_plan", None) and kind != "opt":
        raise ModelError(
            f'{name}: type "{kind}" has no pipeline plan (base_model_pp_plan) in transformers, so '
            'it cannot be cut; use a type with a plan, such as "llama", "qwen3", "mistral" or '
            '"olmo2"'
        )
    if getattr(config, "per_layer_attributes", None):
        varying = ", ".join(sorted(config.per_layer_attributes))
        raise ModelError(
            f"{name}: its layers differ in {varying}, which dilocox does not support; use another "
            "model type"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{name}: its weights are quantised and cannot be trained; use the unquantised model"
        )
