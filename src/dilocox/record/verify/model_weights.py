"""Check that a published model's folder holds no other weights than the compared weights.

transformers loads the first form of weights that it finds: its own sharded checkpoints, one file,
an index, pickles. Of a shard it loads all tensors, even those that the index does not name. So a
user could get other weights that lie in the folder beside those of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dilocox.errors import RecordError
from dilocox.models.hf_weights import INDEX_FILE, SINGLE_FILE
from dilocox.record.verify.model_files import TENSORS
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE

OTHERS = (
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".npz",
)  # fmt: skip
"""Weights in formats that a run never publishes, signed or not."""
ADAPTER = "adapter_"
"""Prefix of the files that transformers loads on top of a model, or in its place."""
POINTER = "transformers_weights"
"""Key in config.json that names a file which transformers loads without looking for another."""


def check_weights(folder: Path, names: Mapping[str, str]) -> None:
    """Raise `RecordError` unless loading `folder` gives exactly the tensors `names`.

    `names`: file name by stored tensor name.
    """
    files = set(names.values())
    if SINGLE_FILE in files and (folder / INDEX_FILE).exists():
        raise RecordError(
            f"{folder / SINGLE_FILE}: lies beside {INDEX_FILE}, and would be loaded instead of the "
            "files that the index names"
        )
    for path in sorted(folder.iterdir()):
        if path.name not in files:
            _check_other(path)
    for file in sorted(files):
        _check_keys(folder / file, {name for name, where in names.items() if where == file})
    _check_pointer(folder, {SINGLE_FILE if files == {SINGLE_FILE} else INDEX_FILE})


def check_adapter(folder: Path, names: set[str]) -> None:
    """Raise `RecordError` unless loading the PEFT folder `folder` gives exactly adapters `names`.

    The configuration of the adapters is one of the signed files (`check_other_files`).
    """
    for path in sorted(folder.iterdir()):
        if path.name not in (ADAPTER_FILE, ADAPTER_CONFIG):
            _check_other(path)
    _check_keys(folder / ADAPTER_FILE, names)


def check_tensors(folder: Path, names: set[str]) -> None:
    """Raise `RecordError` unless `folder` holds exactly the tensors `names`, in one file."""
    for path in sorted(folder.iterdir()):
        if path.name != SINGLE_FILE:
            _check_other(path)
    _check_keys(folder / SINGLE_FILE, names)


def _check_other(path: Path) -> None:
    """Raise `RecordError` if a file or folder without compared tensors may hold other weights."""
    name = path.name.lower()
    if path.is_dir():
        # Nobody has signed files in subfolders. Git and hubs use hidden folders.
        if not name.startswith("."):
            raise RecordError(f"{path}: a folder, but published models have no subfolders")
    elif name.endswith(TENSORS):
        raise RecordError(
            f"{path}: its tensors are not those that were published, and may be loaded instead"
        )
    elif _is_weights(name):
        raise RecordError(f"{path}: weights in a format that no run publishes")


def _is_weights(name: str) -> bool:
    indexes = ".index." in name and name != INDEX_FILE
    return name.endswith(OTHERS) or name.startswith(ADAPTER) or indexes


def _check_keys(path: Path, expected: set[str]) -> None:
    if path.suffix != TENSORS:
        raise RecordError(f"{path}: named as a file of tensors, but not a {TENSORS} file")
    try:
        with safe_open(path, framework="numpy") as file:
            found = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None
    for name in sorted(found - expected):
        raise RecordError(f"{path}: holds {name}, which is not listed as one of its tensors")
    for name in sorted(expected - found):
        raise RecordError(f"{path}: lacks {name}, which is listed as one of its tensors")


def _check_pointer(folder: Path, allowed: set[str]) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        pointer = config.get(POINTER)
    except (OSError, ValueError, AttributeError) as error:
        raise RecordError(f"{folder / 'config.json'}: cannot be read ({error})") from None
    if pointer is not None and pointer not in allowed:
        raise RecordError(f"{folder / 'config.json'}: {POINTER} names other weights, {pointer!r}")
