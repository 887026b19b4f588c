"""SmolLM2-135M-Instruct for slow tests: a pretrained model with a chat template."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import get_smollm2


def smollm2(root: Path) -> Path:
    """Write the model into a new folder of `root`; skip the test where it cannot be had."""
    folder = root / "smollm2"
    try:
        get_smollm2.make(folder)
    except get_smollm2.UnavailableError as error:
        pytest.skip(f"no SmolLM2 here: {error}")
    return folder
