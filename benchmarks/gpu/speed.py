"""One step as shipped beside a plain loop: tokens/s, ratio of pairs of turns, MFU, peak memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import product, sizes
from benchmarks.gpu.child import Context, Outcome
from benchmarks.gpu.clock import wait
from benchmarks.gpu.sizes import Shape
from benchmarks.plain_loop import PlainLoop, Recipe

WARM_UP = {"gpu": 3, "cpu": 1, "tiny": 1}
"""Steps that do not count: compilation is among them."""
TURN = {"gpu": 2, "cpu": 2, "tiny": 1}
"""Steps of a turn."""
SECONDS = {"gpu": 9.0, "cpu": 2.0, "tiny": 0.0}
"""Of each comparison."""
LEAST_PAIRS = 3


@dataclass
class Side:
    """One of two loops that take turns."""

    name: str
    step: Callable[[], object]
    deterministic: bool
    peak_bytes: int = 0
    rates: list[float] = field(default_factory=list)
    """Tokens/s of each turn."""

    @property
    def rate(self) -> float:
        """Median tokens/s."""
        return statistics.median(self.rates)


@contextmanager
def _flags(deterministic: bool) -> Iterator[None]:
    """PyTorch's determinism as the side has set it: the flags belong to the process."""
    kept = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
    )
    if not deterministic:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        torch.backends.cudnn.deterministic = kept[2]


def _turn(side: Side, steps: int, tokens: int, cuda: bool) -> float:
    with _flags(side.deterministic):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        wait(cuda)
        before = torch.cuda.memory_allocated() if cuda else 0
        began = time.perf_counter()
        for _ in range(steps):
            side.step()
        wait(cuda)
        took = time.perf_counter() - began
        if cuda:
            # Both models lie in the memory, so a side's peak is what its step adds.
            side.peak_bytes = max(side.peak_bytes, torch.cuda.max_memory_allocated() - before)
    return steps * tokens / took


def alternate(first: Side, second: Side, shape: Shape, context: Context) -> list[float]:
    """Let two sides take turns, A B, B A; the ratios first / second of the pairs."""
    steps, ratios = TURN[context.scale], []
    for side in (first, second):
        _turn(side, WARM_UP[context.scale], shape.tokens, context.cuda)
        side.peak_bytes = 0
    end = time.perf_counter() + SECONDS[context.scale]
    while len(ratios) < LEAST_PAIRS or time.perf_counter() < end:
        for side in (first, second) if len(ratios) % 2 == 0 else (second, first):
            side.rates.append(_turn(side, steps, shape.tokens, context.cuda))
        ratios.append(first.rates[-1] / second.rates[-1])
    return ratios


def run(context: Context) -> None:
    """The 0.6B shape: four rows."""
    shape = sizes.QWEN_06B[context.scale]
    context.check("plain loop", lambda: _plain(shape, context, False))
    context.check("plain loop, compiled", lambda: _plain(shape, context, True))
    context.check("speed 0.6B", lambda: _beside(shape, context))
    context.check("determinism", lambda: _determinism(shape, context))


def larger(context: Context) -> None:
    """The 1.3B shape: one row."""
    context.check("speed 1.3B", lambda: _beside(sizes.DENSE_13B[context.scale], context))


def _loop(shape: Shape, cuda: bool, compiled: bool) -> tuple[Side, int]:
    """The plain loop, and the bytes that it holds between steps."""
    before = _held(cuda)
    recipe = Recipe(
        batch=shape.rows, micro_batch=shape.micro, learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.1, clip=1.0, warmup_steps=20, total_steps=1000, final_fraction=0.1,
    )  # fmt: skip
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    config, dtype = product.hf_config_of(shape, cuda), product.compute_dtype(cuda)
    loop = PlainLoop(config, recipe, device, dtype, "sdpa", compile_layers=compiled)
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, shape.vocabulary, (shape.rows, shape.length + 1), generator=draw)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> Tensor:
        return loop.step(inputs, labels)

    step()
    name = "plain loop, compiled" if compiled else "plain loop"
    return Side(name, step, False), _held(cuda) - before


def _ours(shape: Shape, cuda: bool, **sections: dict[str, Any]) -> tuple[Side, int, float]:
    """dilocox as shipped but for `sections`; the bytes held; operations per token."""
    before = _held(cuda)
    site = product.build_site(shape, cuda, **sections)
    site.step()
    deterministic = sections.get("site", {}).get("deterministic", True)
    return Side("dilocox", site.step, deterministic), _held(cuda) - before, site.flops_per_token


def _held(cuda: bool) -> int:
    gc.collect()
    if not cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def _figures(side: Side, held: int, flops: float, cuda: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens_per_second": side.rate}
    peak = sizes.peak_of(torch.cuda.get_device_name()) if cuda else None
    if peak is not None:
        figures["mfu"] = flops * side.rate / peak
    if cuda:
        figures["peak_gib"] = (held + side.peak_bytes) / 2**30
    return figures


def _flops(shape: Shape, cuda: bool) -> float:
    """Operations per token of a step, with causal attention counted by half of its square."""
    matrices = product.parameters_of(shape, cuda)
    attention = shape.layers * shape.heads * shape.head_dim * shape.length
    return 6.0 * (matrices + attention)


def _plain(shape: Shape, context: Context, compiled: bool) -> Outcome:
    side, held = _loop(shape, context.cuda, compiled)
    steps = TURN[context.scale]
    _turn(side, WARM_UP[context.scale], shape.tokens, context.cuda)
    end = time.perf_counter() + SECONDS[context.scale] / 2
    while len(side.rates) < LEAST_PAIRS or time.perf_counter() < end:
        side.rates.append(_turn(side, steps, shape.tokens, context.cuda))
    found = _figures(side, held, _flops(shape, context.cuda), context.cuda)
    return Outcome(None, _about(shape), found)


def _beside(shape: Shape, context: Context) -> Outcome:
    """As shipped, by turns with the compiled plain loop; then without determinism."""
    plain, _ = _loop(shape, context.cuda, True)
    ours, held, flops = _ours(shape, context.cuda)
    ratios = alternate(ours, plain, shape, context)
    found = _figures(ours, held, flops, context.cuda)
    found |= {
        "compiled_loop_tokens_per_second": plain.rate,
        "share_of_compiled_loop": statistics.median(ratios),
        "share_least": min(ratios),
        "share_most": max(ratios),
        "pairs": len(ratios),
    }
    return Outcome(None, _about(shape), found)


def _determinism(shape: Shape, context: Context) -> Outcome:
    """What equal bits cost: seconds of a deterministic step over those of one that is not."""
    strict, _, _ = _ours(shape, context.cuda)
    free, _, _ = _ours(shape, context.cuda, site={"deterministic": False})
    ratios = alternate(free, strict, shape, context)
    found = {
        "deterministic_tokens_per_second": strict.rate,
        "free_tokens_per_second": free.rate,
        "times_not_deterministic": statistics.median(ratios),
        "times_least": min(ratios),
        "times_most": max(ratios),
    }
    return Outcome(None, _about(shape), found)


def _about(shape: Shape) -> str:
    return f"{shape.rows} x {shape.length} tokens a step, micro-batches of {shape.micro}"
