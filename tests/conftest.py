"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Several tests go on at once, so the cores are taken: a second thread of each would only wait.
# Before any import of torch. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.full_disk import FullDisk
from tests.support.selection import may_be_selected, place
from tests.support.skips import as_in_ci

TESTS = Path(__file__).parent

# On a busy machine one example may take any time, which says nothing about what is tested.
# The same examples in every run: a change that fails is found where it was made.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # `make test &` in a script: what is started inherits it, and would not hear a test's Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """A disk below `tmp_path` that can be filled and freed."""
    return FullDisk(monkeypatch, tmp_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that lacks a package or a program fails: `make setup-dev` installs them all."""
    report = yield
    return as_in_ci(report) if os.environ.get("CI") else report


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave test files out of whose tests `-m` selects none, unless one is asked for by name."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    asked = {Path(argument.split("::")[0]).resolve() for argument in config.args}
    if collection_path in asked:
        return None
    source = collection_path.read_text(encoding="utf-8")
    return None if may_be_selected(source, config.getoption("markexpr")) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files first that take longest."""
    items.sort(key=lambda item: place(item.path.relative_to(TESTS).as_posix()))
