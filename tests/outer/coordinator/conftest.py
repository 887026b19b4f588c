"""A run of three sites, played without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.outer.coordinator.helpers import Driver, run_config


@pytest.fixture
def driver(tmp_path: Path) -> Any:
    made = Driver(tmp_path, run_config())
    yield made
    made.core.close()
