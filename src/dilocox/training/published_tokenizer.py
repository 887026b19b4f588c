"""The tokenizer that is published with a run's model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles
from dilocox.data.tokenizer import load_tokenizer


@contextlib.contextmanager
def tokenizer_of(config: RunConfig, files: TokenFiles | None) -> Iterator[Path | None]:
    """Context with the folder of the tokenizer that is published; None if none is.

    A run without text (`files` is None) publishes the tokenizer that its run file names.
    """
    if files is not None:
        yield files.tokenizer_folder
        return
    if config.data.tokenizer == "train":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="dilocox-") as place:
        folder = Path(place) / "tokenizer"
        load_tokenizer(config.data.tokenizer, folder)
        yield folder
