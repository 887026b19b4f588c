"""Which tests run beside others, and which alone."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOGETHER = (
    "benchmarks", "compression", "data", "models", "outer/controller", "outer/coordinator", "plan",
    "record", "site",
)  # fmt: skip
"""Folders of tests that compute, and do not measure time."""
ALONE = (
    "test_server.py", "test_sharded.py", "test_wan_run.py", "test_wan_peers.py",
    "test_quality_run.py",
)  # fmt: skip
"""Modules there that start whole sites or servers, or wait for clocks."""
ALSO = ("outer/test_invariants.py", "test_config.py", "test_docs.py", "test_preflight.py")
"""Modules elsewhere that compute only."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `alone` what starts processes that wait for each other, or measures time."""
    for item in items:
        where = item.path.relative_to(HERE).as_posix()
        together = where.startswith(tuple(f"{folder}/" for folder in TOGETHER)) or where in ALSO
        if not together or item.path.name in ALONE:
            item.add_marker(pytest.mark.alone)
