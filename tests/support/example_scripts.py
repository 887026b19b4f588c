"""Imports the scripts of `examples/`, which are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(example: str, name: str) -> ModuleType:
    """Return `examples/EXAMPLE/NAME.py` as a module."""
    where = EXAMPLES / example / f"{name}.py"
    called = f"example_{example.replace('-', '_')}_{name}"
    spec = importlib.util.spec_from_file_location(called, where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module
    spec.loader.exec_module(module)
    return module
