"""Writes a run's adapters and their base model as one whole Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dilocox.errors import CheckpointError
from dilocox.models.adapter_folder import AdapterFolder
from dilocox.models.architecture import one_line
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from dilocox.utils.template_files import TEMPLATES_FOLDER


def write_merged(adapters: AdapterFolder, target: Path, dtype: Any) -> None:
    """Write the base model with the adapters added to its weights, and the other files.

    PEFT adds the products to the weights in fp32, so the whole model is in memory in fp32. Rounding
    to `dtype` (torch's) comes last, to nearest, ties to even.

    Args:
        adapters: the PEFT folder.
        target: an empty folder.
        dtype: data type of the written weights.

    Raises:
        CheckpointError: if the base model or the adapters cannot be loaded, or do not fit together.
        OSError: if a file cannot be written.
    """
    import torch

    from dilocox.models.network import load_network

    try:
        merged = load_network(adapters.folder, adapters, torch.float32).merge_and_unload()
    except Exception as error:  # missing or damaged files, other shapes: many kinds
        raise CheckpointError(
            f"{adapters.folder}: cannot be added to its base model {adapters.base[0]} "
            f"({one_line(error)}); "
            f"write the folder of the right one as base_model_name_or_path in {ADAPTER_CONFIG}"
        ) from None
    merged.to(dtype).save_pretrained(target)
    for file in target.iterdir():
        # The library creates files that only their owner, and so no web server, can read.
        file.chmod(0o644)
    for file in sorted(adapters.folder.iterdir()):
        if file.is_file() and file.name not in (ADAPTER_CONFIG, ADAPTER_FILE):
            (target / file.name).write_bytes(file.read_bytes())
    if (adapters.folder / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(adapters.folder / TEMPLATES_FOLDER, target / TEMPLATES_FOLDER)
