"""What lies in a published model's folder beside its tensors."""

from __future__ import annotations

from pathlib import Path

from dilocox.storage import sha256_of

TENSORS = ".safetensors"
RELEASED = ("README.md", "croissant.json", "model.sig")
"""What a release adds to a published folder: nothing that a model is loaded from. The release's own
signature covers them."""


def other_files(folder: Path) -> dict[str, str]:
    """SHA-256, hex, by name of all files in `folder` that hold no tensors and come with a model."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix != TENSORS and _published(path.name):
            found[path.name] = sha256_of(path)
    return found


def _published(name: str) -> bool:
    return not name.startswith(".") and name not in RELEASED
