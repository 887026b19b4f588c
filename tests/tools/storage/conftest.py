"""A run that the tests publish: an old one, committed, of which each test has a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.older_record import unpacked


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "old")
    return tmp_path / "old"
