"""Which tests run beside others, and which alone."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOGETHER = (
    "audit",
    "benchmarks",
    "compression",
    "data",
    "models",
    "outer/controller",
    "plan",
    "record",
)
"""Folders of tests that compute, each in one process."""
ALONE = ("test_sharded.py", "test_wan_run.py", "test_wan_peers.py", "test_quality_run.py")
"""Modules there that start a site's processes all the same."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `alone` what starts processes that wait for each other, or measures time."""
    for item in items:
        where = item.path.relative_to(HERE).as_posix()
        together = where.startswith(tuple(f"{folder}/" for folder in TOGETHER))
        if not together or item.path.name in ALONE:
            item.add_marker(pytest.mark.alone)
