"""Whether the installed PyTorch and transformers can run dilocox, asked before anything starts."""

from __future__ import annotations

import re
from importlib import metadata

from dilocox.errors import ConfigError
from dilocox.utils.torch_internals import missing_name

LOWEST = {"torch": "2.11", "transformers": "5.17"}
"""What pyproject.toml asks for, too."""
TESTED = {"torch": "2.11 to 2.14", "transformers": "5.17 to 5.24"}


def check_versions() -> None:
    """Refuse a PyTorch or transformers that is too old, or a PyTorch that lacks a private name.

    Raises `ConfigError` with the version, what is missing, and the versions that are tested.
    Imports neither transformers nor anything that touches a GPU.
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
    """Of "2.11.0+cu130" (2, 11); fewer where the version has fewer."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])
