"""What the tests of benchmarks share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Take back the handlers of a benchmark that is called in this process (`end_on_signals`)."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
