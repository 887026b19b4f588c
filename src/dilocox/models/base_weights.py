"""Digest of a frozen base model: of its configuration, and of every stored tensor.

Sites with adapters exchange and record the adapters alone. The digest shows that all of them, and
whoever verifies the run, have the same base. The layout of the files does not change it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dilocox.errors import ModelError
from dilocox.models.hf_weights import stored_names

Progress = Callable[[float], None]
"""Called with the finished fraction, 0 to 1."""
_BLOCK = 2**24
"""Bytes that are read at a time."""
_OF_LIBRARIES = ("transformers_version", "_name_or_path", "use_cache", "torch_dtype", "dtype")
"""Keys of config.json that say how files were written, and not how the model computes."""


def base_digest(folder: Path, progress: Progress = lambda _share: None) -> str:
    """Return the SHA-256, hex, of a model folder's configuration and stored tensors.

    The digest covers names, dtypes, shapes and bytes of all stored tensors, in the order of names.
    Raises `ModelError` if a file is missing or damaged.
    """
    files = sorted(set(stored_names(folder).values()))
    total = sum((folder / name).stat().st_size for name in files)
    lines, done = [], 0
    try:
        for name in files:
            for line, size in _tensors(folder / name):
                lines.append(line)
                done += size
                progress(done / total)
        config = _configuration(folder / "config.json")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: cannot be read ({error}); fetch the model again") from None
    return hashlib.sha256("\n".join([config, *sorted(lines)]).encode()).hexdigest()


def parameters_of(path: Path) -> int:
    """Return the number of values in a safetensors file. Raises `ModelError` if it is damaged."""
    try:
        with path.open("rb") as file:
            return sum(math.prod(about["shape"]) for about in _header(file)[0].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); fetch the model again") from None


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return what a safetensors file says of each tensor by name, and where its values begin.

    The file begins with the length of its header, 8 bytes little-endian; the header is JSON.
    """
    length = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Yield one line and the size in bytes for each tensor of a safetensors file."""
    with path.open("rb") as file:
        header, start = _header(file)
        for name, about in sorted(header.items()):
            first, end = about["data_offsets"]
            digest = hashlib.sha256()
            file.seek(start + first)
            left = end - first
            while left:
                block = file.read(min(_BLOCK, left))
                if not block:
                    raise ValueError(f"{path.name} is truncated")
                digest.update(block)
                left -= len(block)
            said = [name, about["dtype"], about["shape"], digest.hexdigest()]
            yield json.dumps(said), end - first


def _configuration(path: Path) -> str:
    """Return config.json as canonical text, without the keys of `_OF_LIBRARIES`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in _OF_LIBRARIES}
    return json.dumps(kept, sort_keys=True)
