"""Where the GPU's time of a step goes: kernels of dilocox as shipped, and of the compiled loop."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.gpu import sizes, speed
from benchmarks.gpu.child import Context, Outcome
from benchmarks.gpu.clock import wait

STEPS = {"gpu": 2, "cpu": 1, "tiny": 1}
"""Number of recorded steps, after two that are not recorded."""
SHOWN = 24
"""Number of kernels in the log."""
GROUPS = (
    # The compiler's own kernels have the names of all operations that they fuse.
    ("compiled", ("triton",)),
    ("attention", ("flash", "attention", "fmha", "sdpa")),
    ("matrices", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "mm")),
    ("copies", ("memcpy", "memset", "copy")),
)
"""Parts of kernels' names, in lower case. The first group with a part of the name counts."""


def run(context: Context) -> None:
    """Measure two rows: the kernels of a step of the compiled plain loop, and of dilocox."""
    shape = sizes.QWEN_06B[context.scale]
    # First, so that PyTorch alone has chosen the kernels of its attention.
    context.check(
        "kernels, compiled loop", lambda: _of(speed.loop(shape, context.cuda, True), context)
    )
    gc.collect()
    context.check("kernels, dilocox", lambda: _of(speed.ours(shape, context.cuda), context))


def _of(side: speed.Side, context: Context) -> Outcome:
    """Measure milliseconds of a step by group of kernels. The slowest kernels go to the log."""
    side.flags.set()
    for _ in range(2):
        side.step()
    wait(context.cuda)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if context.cuda else []
    steps = STEPS[context.scale]
    began = time.perf_counter()
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            side.step()
        wait(context.cuda)
    took = time.perf_counter() - began
    each, calls = counted(profile.events() or (), context.cuda)
    figures: dict[str, Any] = {"step_ms": 1e3 * took / steps}
    figures |= {f"{name}_ms": us / 1e3 / steps for name, us in _grouped(each).items()}
    if context.cuda:
        figures["gpu_busy_share"] = sum(each.values()) / 1e6 / took
    for name, us in each.most_common(SHOWN):
        print(f"{us / 1e3 / steps:9.2f} ms {calls[name] // steps:6d} calls  {name[:150]}")
    return Outcome(None, "", figures)


def counted(events: Iterable[Any], cuda: bool) -> tuple[Counter[str], Counter[str]]:
    """Return microseconds and number of the events of the GPU or the CPU, by name.

    Regions that code has named, such as a step of the optimizer, are no kernels: they last as long
    as the kernels in them.
    """
    each: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu == cuda and not event.is_user_annotation:
            each[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
    return each, calls


def _grouped(each: Counter[str]) -> dict[str, float]:
    """Return microseconds by group of kernels."""
    found: Counter[str] = Counter()
    for name, us in each.items():
        low = name.lower()
        group = next((g for g, parts in GROUPS if any(part in low for part in parts)), "other")
        found[group] += us
    return dict(found)
