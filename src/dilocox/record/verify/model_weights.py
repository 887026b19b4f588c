"""A published model's folder must hold no weights but those that were compared.

transformers takes what it finds first: sharded checkpoints of its own, one file, an index, pickles;
of a shard it loads all tensors, named by the index or not. So other weights beside those of the run
may be what a reader gets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dilocox.errors import RecordError
from dilocox.models.hf_weights import INDEX_FILE, SINGLE_FILE
from dilocox.record.verify.model_files import TENSORS

OTHERS = (
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".npz",
)  # fmt: skip
"""Weights in formats that a run never publishes, signed or not."""
ADAPTER = "adapter_"
"""Begins the names of what transformers puts on top of a model, or in its place."""
POINTER = "transformers_weights"
"""In config.json: the file that transformers loads instead of looking for one."""


def check_weights(folder: Path, names: Mapping[str, str]) -> None:
    """Raise `RecordError` unless a program that loads `folder` gets the tensors `names` (stored
    name to file name) and nothing else."""
    files = set(names.values())
    if SINGLE_FILE in files and (folder / INDEX_FILE).exists():
        raise RecordError(
            f"{folder / SINGLE_FILE}: there beside {INDEX_FILE}, and loaded instead of what that "
            "names"
        )
    for path in sorted(folder.iterdir()):
        if path.name not in files:
            _check_other(path)
    for file in sorted(files):
        _check_keys(folder / file, {name for name, where in names.items() if where == file})
    _check_pointer(folder, {SINGLE_FILE if files == {SINGLE_FILE} else INDEX_FILE})


def _check_other(path: Path) -> None:
    """A file, or a folder, that holds none of the tensors which are compared."""
    name = path.name.lower()
    if path.is_dir():
        # What lies in there nobody has signed. Git and hubs keep their own in hidden ones.
        if not name.startswith("."):
            raise RecordError(f"{path}: a folder, which no model is published with")
    elif name.endswith(TENSORS):
        raise RecordError(
            f"{path}: its tensors are none of those that were published, and may be loaded instead"
        )
    elif _is_weights(name):
        raise RecordError(f"{path}: weights in a form in which no run publishes any")


def _is_weights(name: str) -> bool:
    indexes = ".index." in name and name != INDEX_FILE
    return name.endswith(OTHERS) or name.startswith(ADAPTER) or indexes


def _check_keys(path: Path, expected: set[str]) -> None:
    if path.suffix != TENSORS:
        raise RecordError(f"{path}: named as one that holds tensors, and is no {TENSORS} file")
    try:
        with safe_open(path, framework="numpy") as file:
            found = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None
    for name in sorted(found - expected):
        raise RecordError(f"{path}: holds {name}, which is not named as one of its tensors")
    for name in sorted(expected - found):
        raise RecordError(f"{path}: {name} is missing, which is named as one of its tensors")


def _check_pointer(folder: Path, allowed: set[str]) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        pointer = config.get(POINTER)
    except (OSError, ValueError, AttributeError) as error:
        raise RecordError(f"{folder / 'config.json'}: cannot be read ({error})") from None
    if pointer is not None and pointer not in allowed:
        raise RecordError(f"{folder / 'config.json'}: {POINTER} names other weights, {pointer!r}")
