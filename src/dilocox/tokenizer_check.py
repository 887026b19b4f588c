"""Does the tokenizer belong to the weights that a run starts from? Asked before text is read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from dilocox import processes
from dilocox.config import ModelSection, RunConfig
from dilocox.data.tokenizer import load_tokenizer
from dilocox.errors import ConfigError
from dilocox.models import load_model_config

_MEND = "leave out data.tokenizer, or set model.pretrained = false"


def check_trained_tokenizer(config: RunConfig) -> None:
    """Raise `ConfigError` for a new run that would train a tokenizer which its weights do not know.

    Not asked of a run that goes on: whatever its weights have learned, they have learned it.
    """
    if _starts_from_weights(config.model) and config.data.tokenizer == "train":
        raise ConfigError(
            f'data.tokenizer "train": the weights of model.path {config.model.path} know the '
            f"tokens of their own tokenizer only; {_MEND}"
        )


def check_tokenizer(config: RunConfig) -> None:
    """The same, and for a tokenizer that is far too small to be that of the model's weights.

    Raises `ConfigError`, `DataError` for a tokenizer and `ModelError` for a model that cannot be
    loaded.
    """
    check_trained_tokenizer(config)
    model, name = config.model, config.data.tokenizer
    # Embeddings of a model may have rows to spare for its own tokenizer.
    if not _starts_from_weights(model) or name in (model.path, f"{model.path}@{model.revision}"):
        return
    rows = load_model_config(model, None).vocab_size
    size = tokenizer_size(name)
    if 2 * size < rows:
        raise ConfigError(
            f"data.tokenizer {name}: has {size} tokens, the weights of model.path {model.path} a "
            f"vocabulary of {rows}, so that it is not theirs; {_MEND}"
        )


def tokenizer_size(name: str) -> int:
    """Largest token id + 1 of a tokenizer that is loaded. Raises `DataError`."""
    # In a child: its library starts threads.
    return int(processes.call_in_child(_load, name, on_progress=lambda step, share: None))


def _load(name: str, progress: Callable[[str, float], None]) -> int:
    with tempfile.TemporaryDirectory(prefix="dilocox-") as place:
        return load_tokenizer(name, Path(place) / "tokenizer").vocabulary_size


def _starts_from_weights(model: ModelSection) -> bool:
    # A run that goes on from another one needs that one's token files (`check_handover`).
    return model.path is not None and model.pretrained and not model.handover
