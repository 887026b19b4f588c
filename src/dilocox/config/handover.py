"""What a run file takes from the run that it goes on from, where it does not say it itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "handover.json"
"""Of `dilocox.training.portable_checkpoint.Handover`, in the folder that a run hands over."""
MOMENTUM = "outer-momentum.safetensors"
"""The outer momentum beside it: whole tensors by full name."""


def handed_tokenizer(folder: str) -> dict[str, Any]:
    """`data.tokenizer` of the run that handed `folder` over, and `vocabulary_size` if it trained
    its own.

    Empty where that is not known: whoever checks the handover says what is wrong with it. A local
    folder that is not on this machine is replaced by `folder`, which has the tokenizer's files.
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
