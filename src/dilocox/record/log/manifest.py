"""The first statement of a run's log: the run file, the data, the code and the versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig, digest_of
from dilocox.data.croissant import render_croissant
from dilocox.data.manifest import MANIFEST, read_manifest
from dilocox.version import __version__

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
"""Packages whose versions the manifest names, beside dilocox and Python."""


def manifest(config: RunConfig, log_key: str) -> dict[str, Any]:
    """Return the predicate of the manifest: the facts of a run that are known at its start.

    `log_key`: the log's public key, as text. Raises `DataError` like `data_digests`.
    """
    return {
        "name": config.run.name,
        "config": config.shared(),
        "config_digest": digest_of(config.shared()),
        "log": log_key,
        "commitments": not config.exchanges_gradients,
        "flush_states": config.record.states_every > 0,
        "start_class": True,
        "kept_keys": True,
        "reports": True,
        "code": code_digest(),
        "data": data_digests(config),
        "versions": {
            "dilocox": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
    }


def data_digests(config: RunConfig) -> dict[str, str] | None:
    """Return the digest of the shared token files' manifest, and of their Croissant description.

    Both are SHA-256, hex. Returns None if the coordinator has no token files; then the sites name
    the digests. Raises `DataError` if the token files' manifest cannot be read.
    """
    if not (config.data_folder / MANIFEST).exists():
        return None
    found = read_manifest(config.data_folder)
    text = render_croissant(found["content"])
    return {
        "manifest": found["digest"],
        "croissant": hashlib.sha256(text.encode()).hexdigest(),
    }


def code_digest() -> str:
    """Return the SHA-256, hex, over names and bytes of this dilocox's source files."""
    root = Path(__file__).parents[2]
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
