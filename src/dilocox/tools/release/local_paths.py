"""Finds absolute paths of this machine in files that are published.

Some keys of the run file count for its digest, which the sites have signed. So publishing cannot
leave their values out, but it can name them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAID = "dilocox: {}: has absolute paths of a machine, which everybody can read: {}"
_PATH = re.compile(r"((?i:file):(//[\w.-]*)?)?(~[\w.-]*)?/[^/\s]+/[^\n]+")
_WORDS = ("tokenizer.json", "vocab.json")
"""Files whose values are words of a tokenizer."""
_TOKENS = ("added_tokens_decoder", "chat_template")
"""Keys whose values are text."""


def local_paths(name: str, content: bytes) -> list[str]:
    """Return the keys of a TOML or JSON file whose values are absolute paths, sorted.

    `name`: path of the file; other files have none. Paths without a folder in them, such as
    `/data`, are passed over. A file that is not valid has no keys.
    """
    try:
        if name.endswith(".toml"):
            read: Any = tomllib.loads(content.decode())
        elif name.endswith(".json") and not name.endswith(_WORDS):
            read = json.loads(content)
        else:
            return []
    except (ValueError, RecursionError):
        return []  # nothing says which part of the text is a value
    return sorted(set(_keys(read, ())))


def told_paths(folder: Path) -> Iterator[str]:
    """Iterate over one line for each run file and file of the model in `folder` with paths."""
    for path in (folder / "run.toml", *sorted((folder / "model").glob("*.json"))):
        name = str(path.relative_to(folder))
        keys = local_paths(name, path.read_bytes())
        if keys:
            yield SAID.format(name, ", ".join(keys))


def _keys(value: Any, above: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in _TOKENS:
                yield from _keys(each, (*above, str(key)))
    elif isinstance(value, list):
        for each in value:
            yield from _keys(each, above)
    elif isinstance(value, str) and _PATH.fullmatch(value):
        yield ".".join(above)
