"""The compiled contract `RunLedger`, as `scripts/compile_contract.py` wrote it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

NAME = "run_ledger.json"


@dataclass(frozen=True)
class Artifact:
    """A compiled contract."""

    abi: list[dict[str, Any]]
    bytecode: str
    """Code of the constructor, hex with 0x."""
    runtime: str
    """Code of the contract, hex with 0x, with zeros where the constructor writes."""
    immutables: dict[str, list[int]]
    """Places of 32 bytes in the code that the constructor writes, by name of the variable."""


@functools.cache
def load_artifact() -> Artifact:
    """Return the contract that comes with this dilocox."""
    found = json.loads(resources.files(__package__).joinpath(NAME).read_text(encoding="utf-8"))
    return Artifact(*(found[name] for name in ("abi", "bytecode", "runtime", "immutables")))
