"""Checks that the tokenizer belongs to the weights from which a run starts, before text is read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from dilocox.config.run_config import ModelSection, RunConfig
from dilocox.data.chat_encoding import chosen_template
from dilocox.data.tokenizer import load_tokenizer, names_missing_folder
from dilocox.errors import ConfigError, DataError
from dilocox.models import load_model_config
from dilocox.training.portable_checkpoint import Handover
from dilocox.utils import processes

_MEND = "leave out data.tokenizer, or set model.pretrained = false"


def check_trained_tokenizer(config: RunConfig) -> None:
    """Raise `ConfigError` if a new run would train a tokenizer that its weights do not know.

    Not called for a resumed run: its weights have been trained on its tokens already.
    """
    if _starts_from_weights(config.model) and config.data.tokenizer == "train":
        raise ConfigError(
            f'data.tokenizer "train": the weights of model.path {config.model.path} only know the '
            f"tokens of their own tokenizer; {_MEND}"
        )


def check_handed_tokenizer(config: RunConfig) -> None:
    """Check the size of a tokenizer that a run with a handover would train.

    Raises `ConfigError` if the earlier run's tokenizer had another size. Without this check, the
    run would only be refused after all text is encoded. Raises `CheckpointError` if the handover
    cannot be read, and `DataError` if its tokenizer cannot be read.
    """
    data = config.data
    file = Path(str(config.handover)).expanduser() / "tokenizer.json"
    # Without a tokenizer in the handover, only the token files can be compared later.
    if config.handover is None or data.tokenizer != "train" or not file.is_file():
        return
    size = max(read_vocabulary(file).values(), default=-1) + 1
    if size != data.vocabulary_size:
        run = Handover.read(config.handover).run
        raise ConfigError(
            f'data.tokenizer "train": would give {data.vocabulary_size} tokens '
            f"(data.vocabulary_size), the tokenizer of run {run} has {size}, and token ranges "
            f"would name other text; set data.tokenizer as in the run.toml of run {run}, or "
            f"data.vocabulary_size = {size} if that run trained its own tokenizer"
        )


def read_vocabulary(file: Path) -> dict[str, int]:
    """Return the ids of a `tokenizer.json` by token. Raises `DataError` if it cannot be read."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain `Exception`
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file}: cannot be read ({reason}); copy the folder again") from None
    return dict(tokenizer.get_vocab(with_added_tokens=True))


def check_tokenizer_keys(config: RunConfig) -> None:
    """Check what a new run's tokenizer must be by the run file, without loading a tokenizer.

    Does `check_trained_tokenizer` and `check_handed_tokenizer`. Also refuses a `model.path` that
    names a folder that does not exist, if the tokenizer is looked for there, and a file of a chat
    template that cannot be read.

    Raises `ConfigError` if the tokenizer does not fit, `DataError` for the template, and the errors
    of `check_handed_tokenizer`.
    """
    chosen_template(config.data)
    check_trained_tokenizer(config)
    check_handed_tokenizer(config)
    name = config.data.tokenizer
    if name == config.model.path and names_missing_folder(name):
        raise ConfigError(
            f"model.path {name}: no such folder; give an existing folder or a hub name (its "
            "tokenizer is looked for there, too, because data.tokenizer is not set)"
        )


def check_tokenizer(config: RunConfig) -> None:
    """Check a new run's tokenizer in all ways that need no text.

    Does `check_tokenizer_keys`. Also refuses a tokenizer that is far too small to be the one of
    the model's weights.

    Raises `ConfigError` if the tokenizer does not fit, `DataError` and `ModelError` if tokenizer
    or model cannot be loaded, and the errors of `check_handed_tokenizer`.
    """
    check_tokenizer_keys(config)
    model, name = config.model, config.data.tokenizer
    # A model's embedding may have more rows than its own tokenizer has tokens.
    if not _starts_from_weights(model) or name in (model.path, f"{model.path}@{model.revision}"):
        return
    rows = load_model_config(model, None).vocab_size
    size = tokenizer_size(name)
    if 2 * size < rows:
        raise ConfigError(
            f"data.tokenizer {name}: has {size} tokens, but the weights of model.path {model.path} "
            f"have a vocabulary of {rows}, so it cannot be their tokenizer; {_MEND}"
        )


def tokenizer_size(name: str) -> int:
    """Load the tokenizer `name`, and return its largest token id + 1.

    Raises `DataError` if it cannot be loaded.
    """
    # Loaded in a child process, because the tokenizer library starts threads.
    return int(processes.call_in_child(_load, name, on_progress=lambda step, share: None))


def model_vocabulary(config: RunConfig) -> int | None:
    """Return the vocabulary size that the run's model takes from its tokenizer.

    This is the size before any text is read. None if the model has a size of its own. Raises
    `DataError` if the tokenizer cannot be loaded.
    """
    name, architecture = config.data.tokenizer, config.model.architecture
    if name == "train":
        return config.data.trained_vocabulary
    if architecture is None or "vocab_size" in architecture:
        return None
    try:
        return _size_of(name)
    except DataError as error:
        raise DataError(
            f"{error}; to plan without the tokenizer, set vocab_size in model.architecture"
        ) from None


@cache
def _size_of(name: str) -> int:
    return tokenizer_size(name)


def _load(name: str, progress: Callable[[str, float], None]) -> int:
    with tempfile.TemporaryDirectory(prefix="dilocox-") as place:
        return load_tokenizer(name, Path(place) / "tokenizer").vocabulary_size


def _starts_from_weights(model: ModelSection) -> bool:
    # A run with a handover needs the earlier run's token files (see `check_handed_tokenizer`).
    return model.path is not None and model.pretrained and not model.handover
