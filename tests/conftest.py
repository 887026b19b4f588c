"""Which tests run beside others, and which alone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.full_disk import FullDisk

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
ALONE = ("e2e", "lab", "benchmarks/test_wan_peers.py", "outer/test_link_times.py")
"""Folders of tests, and modules, that kill, stop or measure: they watch the clock."""
RUNS = (
    "benchmarks/test_quality_run.py",
    "benchmarks/test_wan_run.py",
    "e2e/test_admission.py",
    "e2e/test_api.py",
    "e2e/test_audit.py",
    "e2e/test_engine.py",
    "e2e/test_gpu_faults.py",
    "e2e/test_network.py",
    "e2e/test_not_finite.py",
    "e2e/test_readme.py",
    "e2e/test_record.py",
    "e2e/test_replicas.py",
    "e2e/test_trace.py",
    "e2e/test_versions.py",
    "e2e/test_wire_bytes.py",
    "models/test_sharded.py",
)
"""Modules of whole runs that do not: two at a time, as a run leaves much of two cores idle."""


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # `make test &` in a script: what is started inherits it, and would not hear a test's Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """A disk below `tmp_path` that can be filled and freed."""
    return FullDisk(monkeypatch, tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as `runs`, `alone` or `waits`; those that compute have no mark."""
    for item in items:
        where = item.path.relative_to(HERE).as_posix()
        if _of(where, RUNS):
            item.add_marker(pytest.mark.runs)
        elif _of(where, ALONE):
            item.add_marker(pytest.mark.alone)
        elif not _of(where, COMPUTE):
            item.add_marker(pytest.mark.waits)


def _of(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)
