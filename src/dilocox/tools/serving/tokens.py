"""The tokenizer of a model that is served, and the tokens that end its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilocox.errors import CheckpointError, ConfigError
from dilocox.models.architecture import one_line
from dilocox.tools.serving.other_servers import read_json


def ends_of_turn(folder: Path) -> list[str]:
    """Return the texts of the tokens that end a message or a text, as generation stops there."""
    tokenizer = load_tokenizer(folder)
    numbers = {*end_tokens(folder), tokenizer.eos_token_id} - {None}
    texts = tokenizer.convert_ids_to_tokens(sorted(numbers))
    return [str(text) for text in texts if text is not None]


def end_tokens(folder: Path) -> list[int]:
    """Return the tokens at which generation stops, as `generation_config.json` says."""
    said = read_json(folder / "generation_config.json")
    ends = said.get("eos_token_id")
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def load_tokenizer(folder: Path) -> Any:
    """Return the fast tokenizer in a Hugging Face folder. No code in the folder is run.

    Raises `CheckpointError` if it cannot be loaded, and `ConfigError` if it has no fast version.
    """
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError or KeyError, depending on the folder
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be loaded ({one_line(error)})"
        ) from None
    if not found.is_fast:
        raise ConfigError(f"{folder}: has no fast tokenizer (tokenizer.json)")
    return found
