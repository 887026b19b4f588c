"""The committed artifact is what the source compiles to."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from dilocox.tools.settlement.artifact import load_artifact

ROOT = Path(__file__).parents[3]


def test_the_artifact_is_of_this_source() -> None:
    """By the source's digest, so that a forgotten compilation is seen without the compiler."""
    text = resources.files("dilocox.tools.settlement").joinpath("run_ledger.json").read_text()
    source = (ROOT / "contracts" / "RunLedger.sol").read_bytes()
    assert json.loads(text)["source"] == hashlib.sha256(source).hexdigest()
    assert len(load_artifact().bytecode) < 2 * 49_152, "longer than a chain takes"


@pytest.mark.slow
def test_recompiled_equals_committed() -> None:
    command = [sys.executable, "scripts/compile_contract.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
