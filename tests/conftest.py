"""Which tests run beside others, and which alone."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPUTE = (
    "audit",
    "benchmarks",
    "compression",
    "data",
    "models",
    "outer/controller",
    "plan",
    "record",
)
"""Folders of tests that compute, each in one process: two at a time keep two cores busy."""
ALONE = ("e2e", "lab")
"""Folders of tests that start whole runs, or measure links."""
RUNS = ("test_sharded.py", "test_wan_run.py", "test_wan_peers.py", "test_quality_run.py")
"""Modules elsewhere that do so, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as `alone` or `waits`; those that compute have no mark."""
    for item in items:
        where = item.path.relative_to(HERE).as_posix()
        if _below(where, ALONE) or item.path.name in RUNS:
            item.add_marker(pytest.mark.alone)
        elif not _below(where, COMPUTE):
            item.add_marker(pytest.mark.waits)


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return path.startswith(tuple(f"{folder}/" for folder in folders))
