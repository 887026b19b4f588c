"""What all tests share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.full_disk import FullDisk

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # `make test &` in a script: what is started inherits it, and would not hear a test's Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """A disk below `tmp_path` that can be filled and freed."""
    return FullDisk(monkeypatch, tmp_path)
