"""Does the tokenizer belong to the weights that a run starts from? Asked before text is read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from dilocox.config.run_config import ModelSection, RunConfig
from dilocox.data.tokenizer import load_tokenizer, names_missing_folder
from dilocox.errors import ConfigError, DataError
from dilocox.models import load_model_config
from dilocox.training.portable_checkpoint import Handover
from dilocox.utils import processes

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


def check_handed_tokenizer(config: RunConfig) -> None:
    """Raise `ConfigError` for a run that would train a tokenizer of another size than the run had
    that it goes on from.

    Those token files would be refused, but only when all text is encoded. Raises `CheckpointError`
    for a handover that cannot be read, `DataError` for its tokenizer.
    """
    model, data = config.model, config.data
    file = Path(str(model.path)).expanduser() / "tokenizer.json"
    # A handover may be without a tokenizer: then the token files alone can tell.
    if not model.handover or data.tokenizer != "train" or not file.is_file():
        return
    size = max(read_vocabulary(file).values(), default=-1) + 1
    if size != data.vocabulary_size:
        run = Handover.read(model.path).run
        raise ConfigError(
            f'data.tokenizer "train": would give {data.vocabulary_size} tokens '
            f"(data.vocabulary_size), the tokenizer of run {run} has {size}, and token ranges "
            f"would name other text; set data.tokenizer as the run.toml of run {run} has it, or "
            f"data.vocabulary_size = {size} if it trained its own"
        )


def read_vocabulary(file: Path) -> dict[str, int]:
    """Ids by token of a `tokenizer.json`. Raises `DataError`."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file}: cannot be read ({reason}); copy the folder again") from None
    return dict(tokenizer.get_vocab(with_added_tokens=True))


def check_tokenizer(config: RunConfig) -> None:
    """The same, and for a tokenizer that is far too small to be that of the model's weights.

    Raises `ConfigError`, `DataError` for a tokenizer and `ModelError` for a model that cannot be
    loaded, and all that `check_handed_tokenizer` does.
    """
    check_trained_tokenizer(config)
    check_handed_tokenizer(config)
    model, name = config.model, config.data.tokenizer
    if name == model.path and names_missing_folder(name):
        raise ConfigError(
            f"model.path {name}: no such folder; give an existing one or a hub name (its tokenizer "
            "is looked for there, too, as data.tokenizer is not set)"
        )
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
    # A run that goes on from another one needs that one's token files (`check_handed_tokenizer`).
    return model.path is not None and model.pretrained and not model.handover
