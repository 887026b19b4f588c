"""Timing of work on a GPU or a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def wait(cuda: bool) -> None:
    """Wait until the device has completed all of its work."""
    if cuda:
        torch.cuda.synchronize()


def median_seconds(
    call: Callable[[], object], cuda: bool, seconds: float = 0.3, least: int = 3
) -> float:
    """Return the median seconds of a call, after one call that does not count."""
    call()
    wait(cuda)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        wait(cuda)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
