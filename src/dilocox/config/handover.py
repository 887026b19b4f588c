"""Defaults of a run file that continues an earlier run from its handover folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "handover.json"
"""File in a handover folder that holds a `dilocox.training.portable_checkpoint.Handover`."""
MOMENTUM = "outer-momentum.safetensors"
"""File in a handover folder that holds the outer momentum: unsharded tensors by full name."""


def handed_tokenizer(folder: str) -> dict[str, Any]:
    """Returns the defaults of `[data]` that come from the run which wrote handover folder `folder`.

    The keys are `tokenizer`, and `vocabulary_size` if that run trained its own tokenizer. If the
    earlier tokenizer was a local folder that this machine lacks, `folder` replaces it, since
    `folder` holds a copy of the tokenizer's files. The result is empty if the handover file cannot
    be read or names no tokenizer; the later check of the handover reports the fault.
    """
    place = Path(folder).expanduser()
    try:
        found = json.loads((place / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    name = found.get("tokenizer") if isinstance(found, dict) else None
    if not isinstance(name, str) or not name:
        return {}
    if name == "train":
        size = found.get("vocabulary_size")
        return {"tokenizer": name} | ({"vocabulary_size": size} if size else {})
    local = name.startswith(("/", "~", "."))
    if local and not Path(name).expanduser().exists() and (place / "tokenizer.json").is_file():
        name = folder
    return {"tokenizer": name}
