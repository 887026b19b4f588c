"""Names of the files of a PEFT folder, which holds adapters in place of a whole model."""

from __future__ import annotations

from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


def is_adapter_folder(folder: Path) -> bool:
    """Return True if `folder` holds adapters, and not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()
