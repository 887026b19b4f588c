"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.full_disk import FullDisk
from tests.support.skips import as_in_ci

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
