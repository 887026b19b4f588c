"""One inner step: equal bits in repeats, attention, synchronisations with the host, graphs."""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import product, sizes
from benchmarks.gpu.child import Context, Outcome
from benchmarks.gpu.clock import wait

REPEATS = 5
_ATTENTION = "aten::_scaled_dot_product_"
"""Beginning of the names of the operations that compute attention."""


def run(context: Context) -> None:
    """Measure five rows about one training step."""
    context.check("exact gradients", lambda: exact(context))
    context.check("attention", lambda: attention(context))
    context.check("host syncs", lambda: syncs(context))
    context.check("compiled layers", lambda: compiled(context, False))
    context.check("compiled layers, checkpointing", lambda: compiled(context, True))


def exact(context: Context) -> Outcome:
    """Compare the gradients of one batch, `REPEATS` times, with the run file's defaults."""
    site = product.build_site(sizes.STEP[context.scale], context.cuda)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        first = site.loss_and_gradients()
        apart: set[str] = set()
        for _ in range(REPEATS - 1):
            loss, again = site.loss_and_gradients()
            apart |= {n for n, each in first[1].items() if not torch.equal(each, again[n])}
            apart |= {"the loss"} if loss != first[0] else set()
    said = sorted({str(w.message).split(".")[0] for w in heard if "determinis" in str(w.message)})
    told = f"differ in {REPEATS} repeats: {len(apart)}, first {min(apart)}" if apart else (
        f"equal to the bit in {REPEATS} repeats"
    )  # fmt: skip
    figures = {"gradients": len(first[1]), "differ": len(apart)}
    return Outcome(not apart, "; ".join([told, *said])[:300], figures)


def attention(context: Context) -> Outcome:
    """Compare the attention kernels of a step with deterministic kernels and of a step without."""
    ran: list[str] = []
    for deterministic in (True, False):
        site = product.build_site(
            sizes.STEP[context.scale], context.cuda,
            site={"deterministic": deterministic}, model={"compile": False},
        )  # fmt: skip
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            site.step()
        events = (event.key for event in profile.key_averages())
        names = {key.removeprefix(_ATTENTION) for key in events if key.startswith(_ATTENTION)}
        ran.append(", ".join(sorted(n for n in names if not n.endswith("_backward"))))
    told = f"deterministic: {ran[0]}; not deterministic: {ran[1]}"
    return Outcome(all(ran) and "cudnn" not in ran[0], told)


class _Reads(TorchDispatchMode):
    """Counts reads of a device value by the host, by the line that reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found[_caller()] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        inside = f"{os.sep}torch{os.sep}" in frame.filename or frame.filename == __file__
        if not inside:
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return "torch"


def syncs(context: Context) -> Outcome:
    """Count synchronisations of the host in one step of four micro-batches, after two steps."""
    site = product.build_site(sizes.STEP[context.scale], context.cuda)
    for _ in range(2):
        site.step()
    wait(context.cuda)
    found = _on_gpu(site) if context.cuda else _on_cpu(site)
    where = ", ".join(f"{place} x{count}" for place, count in found.most_common(6))
    total = found.total()
    return Outcome(total == 0, where or "no synchronisation", {"syncs": total})


def _on_gpu(site: product.Site) -> Counter[str]:
    found: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            site.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each in heard:
        if "synchroniz" in str(each.message):
            found[f"{os.path.basename(each.filename)}:{each.lineno}"] += 1
    return found


def _on_cpu(site: product.Site) -> Counter[str]:
    with _Reads() as reads:
        site.step()
    found: Counter[str] = reads.found
    return found


def compiled(context: Context, checkpointing: bool) -> Outcome:
    """Count the graphs that `model.compile` makes, with or without activation checkpointing."""
    from torch._dynamo.utils import counters

    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    plain = torch.nn.Module.compile

    def eager(self: torch.nn.Module, *given: Any, **options: Any) -> None:
        # The graphs are counted only, so the fastest backend is not needed.
        plain(self, *given, **{**options, "backend": "eager"})

    model = {"compile": True, "activation_checkpointing": checkpointing}
    with patch.object(torch.nn.Module, "compile", eager):
        site = product.build_site(sizes.STEP[context.scale], context.cuda, model=model)
        site.step()
        problem = site.compile_problem()
    graphs, frames = counters["stats"]["unique_graphs"], counters["frames"]["ok"]
    said = f"{graphs} graphs for {sizes.STEP[context.scale].layers} layers"
    return Outcome(
        graphs >= 1 and problem is None, problem or said, {"graphs": graphs, "frames": frames}
    )
