"""One step as shipped beside a plain loop: tokens/s, ratio of pairs of turns, MFU, peak memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import product, sizes
from benchmarks.gpu.child import Context, Outcome
from benchmarks.gpu.clock import wait
from benchmarks.gpu.sizes import Shape
from benchmarks.plain_loop import PlainLoop, Recipe
from dilocox.utils import torch_internals

WARM_UP = {"gpu": 3, "cpu": 1, "tiny": 1}
"""Number of steps that do not count; compilation is among them."""
TURN = {"gpu": 2, "cpu": 2, "tiny": 1}
"""Number of steps of a turn."""
SECONDS = {"gpu": 9.0, "cpu": 2.0, "tiny": 0.0}
"""Seconds of each comparison."""
LEAST_PAIRS = 3


@dataclass(frozen=True)
class Flags:
    """PyTorch's settings of the whole process for one side."""

    deterministic: bool
    warn_only: bool
    cudnn_deterministic: bool
    sdp: tuple[bool, bool, bool, bool]
    """Whether attention may use flash, memory-efficient, plain and cuDNN kernels."""
    sdp_order: tuple[int, ...]
    """Attention kernels in the order in which they are tried."""

    @classmethod
    def now(cls) -> Flags:
        """Return the current settings."""
        cuda = torch.backends.cuda
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            (
                cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
                cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
            ),
            tuple(torch_internals.sdpa_priority()),
        )  # fmt: skip

    def set(self) -> None:
        """Apply the settings."""
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        cuda = torch.backends.cuda
        cuda.enable_flash_sdp(self.sdp[0])
        cuda.enable_mem_efficient_sdp(self.sdp[1])
        cuda.enable_math_sdp(self.sdp[2])
        cuda.enable_cudnn_sdp(self.sdp[3])
        torch_internals.set_sdpa_priority(list(self.sdp_order))


@dataclass
class Side:
    """One of two loops that take turns."""

    step: Callable[[], object]
    flags: Flags
    held_bytes: int
    """GPU memory between steps."""
    flops_per_token: float
    note: str = ""
    """Why layers are not compiled although they should be. Empty if they are."""
    step_bytes: int = 0
    """GPU memory that a step adds at its peak."""
    rates: list[float] = field(default_factory=list)
    """Tokens/s of each turn."""

    @property
    def rate(self) -> float:
        """Median tokens/s."""
        return statistics.median(self.rates)


def _turn(side: Side, steps: int, tokens: int, cuda: bool) -> float:
    """Train `steps` steps, and return tokens/s."""
    side.flags.set()
    wait(cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    began = time.perf_counter()
    for _ in range(steps):
        side.step()
    wait(cuda)
    took = time.perf_counter() - began
    if cuda:
        # The other side's model is in the memory too.
        side.step_bytes = max(side.step_bytes, torch.cuda.max_memory_allocated() - before)
    return steps * tokens / took


def alternate(first: Side, second: Side, shape: Shape, context: Context) -> list[float]:
    """Let two sides take turns, A B, B A. Returns the ratios first / second of the pairs."""
    steps = TURN[context.scale]
    ratios: list[float] = []
    for side in (first, second):
        _turn(side, WARM_UP[context.scale], shape.tokens, context.cuda)
        side.step_bytes = 0
    end = time.perf_counter() + SECONDS[context.scale]
    while len(ratios) < LEAST_PAIRS or time.perf_counter() < end:
        for side in (first, second) if len(ratios) % 2 == 0 else (second, first):
            side.rates.append(_turn(side, steps, shape.tokens, context.cuda))
        ratios.append(first.rates[-1] / second.rates[-1])
    return ratios


def run(context: Context) -> None:
    """Measure three rows of the 0.6B shape."""
    shape = sizes.QWEN_06B[context.scale]
    context.check("plain loop", lambda: _plain(shape, context))
    context.check("speed 0.6B", lambda: _beside(shape, context))
    context.check("determinism", lambda: _determinism(shape, context))


def larger(context: Context) -> None:
    """Measure one row of the 1.3B shape."""
    context.check("speed 1.3B", lambda: _beside(sizes.DENSE_13B[context.scale], context))


def loop(shape: Shape, cuda: bool, compiled: bool) -> Side:
    """Return the loop of a user of one GPU: `benchmarks/plain_loop.py`, with PyTorch's own
    settings."""
    before = _held(cuda)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    # A site that was built before in this process has switched kernels of attention off.
    for enable in (
        torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_math_sdp, torch.backends.cuda.enable_cudnn_sdp,
    ):  # fmt: skip
        enable(True)
    recipe = Recipe(
        batch=shape.rows, micro_batch=shape.micro, learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.1, clip=1.0, warmup_steps=20, total_steps=1000, final_fraction=0.1,
    )  # fmt: skip
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    config, dtype = product.hf_config_of(shape, cuda), product.compute_dtype(cuda)
    loop = PlainLoop(config, recipe, device, dtype, "sdpa", compile_layers=compiled)
    inputs, labels = product.batch_of(shape)

    def step() -> Tensor:
        return loop.step(inputs, labels)

    step()
    # PyTorch chooses its own order of attention kernels at the first attention.
    flags = Flags.now()
    return Side(step, flags, _held(cuda) - before, _flops(shape, cuda))


def ours(shape: Shape, cuda: bool, **sections: dict[str, Any]) -> Side:
    """Return dilocox as shipped, with changes in `sections`."""
    before = _held(cuda)
    site = product.build_site(shape, cuda, **sections)
    flags = Flags.now()
    site.step()
    note = site.compile_problem() or ""
    return Side(site.step, flags, _held(cuda) - before, site.flops_per_token, note)


def _held(cuda: bool) -> int:
    gc.collect()
    if not cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def _figures(side: Side, cuda: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens_per_second": side.rate}
    peak = sizes.peak_of(torch.cuda.get_device_name()) if cuda else None
    if peak is not None:
        figures["mfu"] = side.flops_per_token * side.rate / peak
    if cuda:
        figures["peak_gib"] = (side.held_bytes + side.step_bytes) / 2**30
    return figures


def _flops(shape: Shape, cuda: bool) -> float:
    """Return operations per token of a step: matrices, and causal attention by half of its
    square."""
    attention = shape.layers * shape.heads * shape.head_dim * shape.length
    return 6.0 * (product.parameters_of(shape, cuda) + attention)


def _plain(shape: Shape, context: Context) -> Outcome:
    """Measure the plain loop without compiled layers."""
    side, steps = loop(shape, context.cuda, False), TURN[context.scale]
    _turn(side, WARM_UP[context.scale], shape.tokens, context.cuda)
    end = time.perf_counter() + SECONDS[context.scale] / 2
    while len(side.rates) < LEAST_PAIRS or time.perf_counter() < end:
        side.rates.append(_turn(side, steps, shape.tokens, context.cuda))
    return Outcome(None, _about(shape), _figures(side, context.cuda))


def _beside(shape: Shape, context: Context) -> Outcome:
    """Measure dilocox as shipped, in turns with the plain loop with compiled layers."""
    torch._dynamo.reset()
    # If the compiler fails, both loops run eagerly, and the row's message has the reason.
    torch._dynamo.config.suppress_errors = True
    plain = loop(shape, context.cuda, True)
    own = ours(shape, context.cuda)
    ratios = alternate(own, plain, shape, context)
    found = _figures(own, context.cuda)
    found |= {f"compiled_loop_{key}": value for key, value in _figures(plain, context.cuda).items()}
    found |= {
        "share_of_compiled_loop": statistics.median(ratios),
        "share_least": min(ratios),
        "share_most": max(ratios),
        "pairs": len(ratios),
    }
    return Outcome(None, "; ".join(filter(None, (_about(shape), own.note))), found)


def _determinism(shape: Shape, context: Context) -> Outcome:
    """Measure the cost of equal bits: seconds of a deterministic step over those of a free one."""
    torch._dynamo.reset()
    strict = ours(shape, context.cuda)
    free = ours(shape, context.cuda, site={"deterministic": False})
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
