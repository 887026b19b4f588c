"""Measures the cost of codecs: bits sent per parameter, and the speed of encoding and decoding.

It uses one core and one thread. For every size there is a buffer with one matrix of normal values,
1,024 columns wide. A copy of the smallest buffer stays in the processor's cache, so no codec can
be as fast. Every measurement of a codec lies between two plain copies of the same buffer in the
same process. The ratio is the codec's time over the mean time of these copies. Times are CPU times
of the process, so other work on the machine hardly counts. Codecs write to existing memory, as
the copy does; only `lowrank` allocates its results. Figures are medians over repetitions; the JSON
file also has their 95 % intervals.

Bits per parameter are those of the frames, headers included. `lowrank` has three messages, which
all count: a factor, the basis (only its owner sends it) and the payload. Its encoding time is that
of projection and encoding; the column `owner` is the owner's work for two sites' factors. `error`
is the squared error of one transfer without error feedback, as a share of the squared values.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from dilocox.compression import Geometry, LowRank, compressor, frame_bytes

CODECS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int2",
    "topk:16",
    "topk:64",
    "topk:410",
    "top1:64",
    "top1:512",
)
SLOWER = ("cocktail", "lowrank:8", "lowrank:64")
QUICK_SIZES = (1 << 20, 1 << 24)
FULL_SIZES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
COLUMNS = 1024
SHORTEST = 0.02
"""Shortest duration of a timed loop, in seconds."""


@dataclass(frozen=True)
class Work:
    """The calls of a codec on one buffer, and the bits per value that it sends."""

    bits: float
    encode: Callable[[], object]
    decode: Callable[[], Tensor]
    owner: Callable[[], object] | None


def work(spec: str, values: Tensor, target: Tensor) -> Work:
    """Prepare the codec `spec` for a buffer `values`, fp32 [n], which it decodes into `target`.

    n must be a multiple of `COLUMNS`.
    """
    n = values.numel()
    made = compressor(spec, Geometry(((n // COLUMNS, COLUMNS),), (0,), n))
    if isinstance(made, LowRank):
        return low_rank(made, values)
    part = made.part(0, n, seed=1)
    payload = part.encode(values)
    return Work(
        8 * frame_bytes(part) / n,
        lambda: part.encode(values, out=payload),
        lambda: part.decode(payload, out=target),
        None,
    )


def low_rank(made: LowRank, values: Tensor) -> Work:
    """Prepare `lowrank`: encoding, decoding and the owner's work for its three messages."""
    warm = made.first_warm()
    factors = [made.project(values, warm)] * 2
    basis = made.orthonormalise(factors)
    payload = made.encode(values, basis)
    parts = (made.factor_part, made.basis_part, made.payload_part)
    return Work(
        8 * sum(frame_bytes(part) for part in parts) / values.numel(),
        lambda: (made.project(values, warm), made.encode(values, basis)),
        lambda: made.decode(payload, basis),
        lambda: made.orthonormalise(factors),
    )


def seconds(act: Callable[[], object], times: int) -> float:
    """Return the mean CPU seconds of `act` over `times` calls in a row."""
    start = time.process_time()
    for _ in range(times):
        act()
    return (time.process_time() - start) / times


def between(
    act: Callable[[], object], copy: Callable[[], object], copies: int, repetitions: int
) -> tuple[list[float], list[float]]:
    """Return CPU seconds of `act`, and of the copies before and after it, per repetition."""
    times = max(1, round(SHORTEST / max(seconds(act, 1), 1e-9)))
    found, around = [], []
    before = seconds(copy, copies)
    for _ in range(repetitions):
        found.append(seconds(act, times))
        after = seconds(copy, copies)
        around.append((before + after) / 2)
        before = after
    return found, around


def row(spec: str, values: Tensor, repetitions: int) -> common.Row:
    """Measure one codec on one buffer, and return the row."""
    target = torch.empty_like(values)

    def copy() -> object:
        return target.copy_(values)

    copies = max(1, round(SHORTEST / seconds(copy, 3)))
    at_work = work(spec, values, target)
    error = (at_work.decode() - values).square_().sum() / values.square().sum()
    measured: common.Row = {
        "codec": spec,
        "values": values.numel(),
        "bits_per_value": round(at_work.bits, 4),
        "error": round(float(error), 6),
    }
    every_copy: list[float] = []
    for name, act in (("encode", at_work.encode), ("decode", at_work.decode)):
        found, around = between(act, copy, copies, repetitions)
        ratio = common.median_interval(
            [one / other for one, other in zip(found, around, strict=True)]
        )
        every_copy += around
        measured[f"{name}_gb_s"] = speed(values, statistics.median(found))
        measured[f"{name}_ratio"] = round(ratio.median, 2)
        measured[f"{name}_ratio_low"] = round(ratio.low, 2)
        measured[f"{name}_ratio_high"] = round(ratio.high, 2)
    measured["copy_gb_s"] = speed(values, statistics.median(every_copy))
    measured["owner_ratio"] = None
    if at_work.owner is not None:
        found, around = between(at_work.owner, copy, copies, repetitions)
        measured["owner_ratio"] = round(statistics.median(found) / statistics.median(around), 2)
    return measured


def speed(values: Tensor, time_taken: float) -> float:
    """Return gigabytes of fp32 per second, in three digits."""
    return float(f"{values.nbytes / time_taken / 1e9:.3g}")


def measure(quick: bool) -> tuple[list[common.Row], dict[str, Any]]:
    """Measure all codecs at all sizes. Returns the rows and the settings."""
    sizes, repetitions = (QUICK_SIZES, 5) if quick else (FULL_SIZES, 9)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for size in sizes:
        values = torch.randn(size, generator=generator) * 1e-3
        for spec in (*CODECS, *SLOWER):
            rows.append(row(spec, values, repetitions))
            common.say(
                f"{size:,} values, {spec}: encode {rows[-1]['encode_ratio']:.1f}, decode "
                f"{rows[-1]['decode_ratio']:.1f} times a copy"
            )
    return rows, {"repetitions": repetitions, "threads": 1, "cores": 1, "columns": COLUMNS}


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    on = common.machine()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows, settings = measure(options.quick)
    columns: dict[str, Callable[[Any], str] | str] = {
        "codec": "s",
        "values": ",d",
        "bits_per_value": ".3f",
        "error": ".4f",
        "encode_gb_s": ".2f",
        "decode_gb_s": ".2f",
        "copy_gb_s": ".1f",
        "encode_ratio": ".1f",
        "decode_ratio": ".1f",
        "owner_ratio": ".1f",
    }
    print(common.table(rows, columns))
    if options.json:
        common.write_json(options.json, "codecs", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
