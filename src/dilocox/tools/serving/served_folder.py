"""The folder that the engine reads: links to the model's files, and a note on its answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dilocox.tools.serving.other_servers import chat_template, read_json
from dilocox.tools.serving.tokens import ends_of_turn
from dilocox.utils.template_files import TEMPLATES_FOLDER

_CONFIG = "tokenizer_config.json"
_KEY = "response_template"
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length")
UNKNOWN_LENGTH = 2**15
"""Tokens of a model whose configuration has no length."""
_CHATML = "<|im_start|>"
"""Begins a message in the templates that transformers' parsers of answers were made for."""


def link_files(source: Path, target: Path) -> None:
    """Make the folder `target` with a link to each file of `source`, and to its templates."""
    target.mkdir()
    for file in source.resolve().iterdir():
        if file.is_file() or file.name == TEMPLATES_FOLDER:
            (target / file.name).symlink_to(file)


def name_answers(folder: Path) -> None:
    """Write into the tokenizer's settings how an answer ends, if transformers would guess wrong.

    transformers picks a parser of answers by the model's type, and such a parser looks for ChatML.
    With another chat template it takes the whole prompt for the answer.
    """
    template, config = chat_template(folder), folder / _CONFIG
    if template is None or _CHATML in template or not config.is_file():
        return
    said = read_json(config)
    if _KEY in said:
        return
    ends = "|".join(re.escape(end) for end in ends_of_turn(folder))
    answer = {"close_pattern": rf"(?:{ends})", "content": "text"}
    said[_KEY] = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"\Z",  # the answer begins where the prompt ends
        "fields": {"content": answer},
    }
    text = json.dumps(said, indent=2) + "\n"
    config.unlink()  # may be a link to the model's own file
    config.write_text(text, encoding="utf-8")


def tokens_of(folder: Path) -> int:
    """Return the number of tokens that the model in `folder` can read and write."""
    said = read_json(folder / "config.json")
    known = next((said[key] for key in _LENGTHS if isinstance(said.get(key), int)), None)
    return known or UNKNOWN_LENGTH
