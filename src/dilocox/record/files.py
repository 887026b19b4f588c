"""What lies in a published model's folder beside its tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

TENSORS = ".safetensors"


def other_files(folder: Path) -> dict[str, str]:
    """SHA-256, hex, by name of all files in `folder` that hold no tensors."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix != TENSORS and not path.name.startswith("."):
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
