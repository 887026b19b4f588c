"""A run of three sites, played without processes, and one that is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.coordinator_driver import Driver, run_config
from tests.support.served_run import Run


@pytest.fixture
def driver(tmp_path: Path) -> Any:
    made = Driver(tmp_path, run_config())
    yield made
    made.core.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()
