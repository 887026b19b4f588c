"""Checks the versions of PyTorch and transformers before a run starts."""

from __future__ import annotations

import re
from importlib import metadata

from dilocox.errors import ConfigError
from dilocox.utils.torch_internals import missing_name

LOWEST = {"torch": "2.11", "transformers": "5.17"}
"""Lowest supported versions, by package; pyproject.toml states the same."""
TESTED = {"torch": "2.11 to 2.14", "transformers": "5.17 to 5.24"}
"""Tested versions by package, as text for messages."""


def check_versions() -> None:
    """Refuse versions of PyTorch or transformers that dilocox does not support.

    Raises `ConfigError` if a version is too old or if PyTorch lacks a private name that dilocox
    needs. The message names the fault and the tested versions. The function imports neither
    transformers nor anything that touches a GPU.
    """
    for package, lowest in LOWEST.items():
        check_lowest(package, metadata.version(package), lowest)
    missing = missing_name()
    if missing is not None:
        name, purpose = missing
        raise ConfigError(
            f"torch {metadata.version('torch')} has no {name}, which dilocox needs for {purpose}; "
            f"install a tested version ({TESTED['torch']})"
        )


def check_lowest(package: str, version: str, lowest: str) -> None:
    """Raise `ConfigError` if `version` of `package` is below `lowest`."""
    if _numbers(version) < _numbers(lowest):
        raise ConfigError(
            f"{package} {version} is too old, dilocox needs {lowest} or newer; install a tested "
            f"version ({TESTED[package]})"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Returns up to two leading numbers of a version: (2, 11) for "2.11.0+cu130"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])
