"""`tests.support.forge`: a forked process as tests see it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from tests.support.forge import _Process


def test_a_signal_to_a_process_that_has_ended_does_nothing(tmp_path: Path) -> None:
    """As with `Popen`: a program that ends by itself may end right before its signal."""
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    process = _Process(ended.pid, tmp_path / "gone")
    process.send_signal(signal.SIGTERM)
    process.kill()


def test_a_process_that_goes_on_gets_its_signal(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as going:
        _Process(going.pid, tmp_path / "gone").send_signal(signal.SIGTERM)
        assert going.wait(20) == -signal.SIGTERM
