"""What tests of the record share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.record_scene import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Three sites that are let in, and the plan of the first round."""
    scene = Scene(tmp_path)
    scene.enrol()
    scene.driver.plan(0, "a")
    return scene
