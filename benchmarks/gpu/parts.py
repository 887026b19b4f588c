"""The parts of the acceptance run, in the order of what they decide, with rows, limits and aims."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Aim:
    """Required value of a figure of a row, on a GPU."""

    figure: str
    sign: str
    """One of `SIGNS`."""
    value: float

    def met(self, figures: Mapping[str, Any]) -> bool:
        """Return whether the figures reach the aim. A missing figure does not."""
        found = figures.get(self.figure)
        if not isinstance(found, int | float):
            return False
        return SIGNS[self.sign](found, self.value)

    def __str__(self) -> str:
        return f"{self.figure} {self.sign} {self.value:g}"


@dataclass(frozen=True)
class Part:
    """Rows that one process measures.

    `function` is `module:name` of a callable that takes a `child.Context`. `seconds` is the
    duration of the part on one H100 or H200, `limit` the seconds after which its process is killed.
    """

    name: str
    function: str
    rows: tuple[str, ...]
    seconds: float
    limit: float
    about: str
    checks: tuple[int, ...] = ()
    """Numbers of the checks in the list of GPU findings."""
    aims: tuple[tuple[str, Aim], ...] = ()
    """Pairs (row, aim)."""
    gpu_only: bool = False

    def aims_of(self, row: str) -> list[Aim]:
        """Return the aims of one row."""
        return [aim for name, aim in self.aims if name == row]


CODECS = ("none", "fp16", "bf16", "int8", "int4", "int2", "topk:64", "top1:64", "cocktail")
_HERE = "benchmarks.gpu"

PARTS: tuple[Part, ...] = (
    Part(
        "machine", f"{_HERE}.machine:run", ("machine",), 8, 240,
        "versions, driver and memory; the first touch of host memory that is not there yet", (0,),
    ),
    Part(
        "two", f"{_HERE}.runs:two", ("two sites", "two sites, verify"), 60, 180,
        "two sites of one stage on one GPU, four rounds, verified", (7,),
    ),
    Part(
        "audit", f"{_HERE}.audits:run",
        ("audit of an honest site", "audit of a tampered site", "the same audit again"), 90, 180,
        "an honest round is EXACT twice, a tampered one MISMATCH", (9,),
    ),
    Part(
        "resume", f"{_HERE}.runs:resume", ("resume",), 90, 200,
        "SIGINT in round 2 and --resume against the unbroken run: the same bits", (8,),
    ),
    Part(
        "nccl", f"{_HERE}.nccl:run", ("nccl, one rank", "nccl, a peer dies"), 25, 90,
        "NCCL of one rank, FSDP2, and the time to exit when a peer dies", (6,),
        gpu_only=True,
    ),
    Part(
        "speed", f"{_HERE}.speed:run",
        ("plain loop", "speed 0.6B", "determinism"), 70, 240,
        "a Qwen3-0.6B shape as shipped beside a plain loop, eager and compiled", (5,),
        aims=(
            ("speed 0.6B", Aim("share_of_compiled_loop", ">=", 0.97)),
            ("speed 0.6B", Aim("mfu", ">=", 0.40)),
            ("determinism", Aim("times_not_deterministic", "<", 1.6)),
        ),
    ),
    Part(
        "step", f"{_HERE}.step:run",
        (
            "exact gradients", "attention", "host syncs", "compiled layers",
            "compiled layers, checkpointing",
        ),
        35, 180, "one inner step: equal bits, attention kernels, host syncs, graphs", (3, 4),
    ),
    Part(
        "link", f"{_HERE}.link:run",
        ("link, no network", "link, two steps", "link, allreduce", "link, as shipped"), 245, 330,
        "a link on which gradients take 400 times as long as a step", (10,),
        aims=(
            ("link, two steps", Aim("share_of_no_network", ">=", 0.99)),
            ("link, two steps", Aim("steps_per_round", "<=", 2)),
            ("link, allreduce", Aim("two_steps_over_allreduce", ">", 357)),
        ),
    ),
    Part(
        "outer", f"{_HERE}.outer:run", ("boundary and landing",), 80, 150,
        'boundary and landing in rounds of two steps with outer.device = "model"', (10,),
        aims=(("boundary and landing", Aim("share_of_round", "<", 0.01)),),
    ),
    Part(
        "memory", f"{_HERE}.faults:memory", ("out of memory",), 60, 120,
        "out of memory on purpose: exit, message, time, number of starts", (12,),
    ),
    Part(
        "codecs", f"{_HERE}.numerics:codecs",
        (*(f"codec {name}" for name in CODECS), "codec lowrank:64", "outer step"), 35, 90,
        "bytes of every codec on the GPU against those of the CPU, and GB/s", (1,),
    ),
    Part(
        "layouts", f"{_HERE}.layouts:run",
        ("two stages", "two stages, verify", "two shards", "two shards, verify", "a rank dies"),
        170, 330, "two sites of two stages, of two shards, and a rank that dies (staged)", (6, 11),
    ),
    Part(
        "mixed", f"{_HERE}.mixed:run", ("mixed sites", "mixed sites, verify"), 60, 150,
        "one site on the GPU and one on the CPUs in one run, verified", (13,),
    ),
    Part(
        "speed-1.3b", f"{_HERE}.speed:larger", ("speed 1.3B",), 60, 150,
        "a 1.3B shape as shipped beside the compiled plain loop", (5,),
        aims=(
            ("speed 1.3B", Aim("share_of_compiled_loop", ">=", 0.97)),
            ("speed 1.3B", Aim("mfu", ">=", 0.40)),
        ),
    ),
    Part(
        "kernels", f"{_HERE}.kernels:run", ("kernels, dilocox", "kernels, compiled loop"), 40, 120,
        "kernels of a step of the 0.6B shape, and of the compiled plain loop", (5,),
    ),
    Part(
        "copies", f"{_HERE}.numerics:copies", ("copies",), 15, 60,
        "copies to and from the GPU, pageable and pinned; SHA-256", (2,),
    ),
)  # fmt: skip


def part_of(row: str, parts: Sequence[Part] = PARTS) -> Part:
    """Return the part that measures a row. Raises `KeyError`."""
    for part in parts:
        if row in part.rows:
            return part
    raise KeyError(row)


def selected(names: Sequence[str], parts: Sequence[Part] = PARTS) -> list[tuple[Part, list[str]]]:
    """Return parts with the rows to measure. `names` are parts or rows; without names, all.

    Raises `ValueError` if a name is neither a part nor a row.
    """
    known = {part.name for part in parts} | {row for part in parts for row in part.rows}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--only {unknown[0]}: no part or row has this name; see --list")
    chosen = []
    for part in parts:
        rows = [r for r in part.rows if not names or part.name in names or r in names]
        if rows:
            chosen.append((part, rows))
    return chosen
