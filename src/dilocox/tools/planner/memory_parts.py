"""Lists the parts of a rank's memory as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.inner.memory import GIB
from dilocox.tools.planner.memory_footprint import Footprint


@dataclass(frozen=True)
class Part:
    """One row: bytes on the rank's device, and bytes in host memory beside a GPU."""

    name: str
    device: int
    host: int = 0


def parts(each: Footprint, reserved: int) -> list[Part]:
    """Return all parts of a rank's memory; parts of 0 bytes are left out.

    `reserved`: bytes of CUDA and NCCL. Rows that begin with `step:` add up to a training step. The
    step and each `or:` row come one after another, so only the largest of them counts.
    """
    outer_here, shared = each.outer_on_device, each.shared
    in_memory = _at(each.under_way, shared)
    rows = [
        Part("weights", each.weights),
        Part("inner optimizer", each.optimizer),
        Part("copies of the weights that stay", each.lasting),
        Part("outer state", *_at(each.outer, outer_here)),
        Part("exchanges", each.exchanges + in_memory[0], in_memory[1]),
        Part("step: gradients", each.gradients),
        Part("step: gathered weights, casts", each.copies - each.lasting),
        Part("step: activations, loss", each.activations),
        Part("or: copy during an evaluation", each.evaluation),
        Part("or: landing", each.landing),
        Part("or: more exchanges at the end of the run", *_at(each.flush, outer_here)),
        Part("or: largest tensor, gathered", each.gathered),
        Part("or: whole stage to be published, first shard", *_at(each.published, shared)),
        Part("or: copy for sites that enter at the start", *_at(each.donated, shared)),
        Part("copy that a checkpoint is written from", *_at(each.snapshot, shared)),
        Part("copy of a state for the record", *_at(each.record_copy, shared)),
        Part("copy of the anchor for the record", *_at(each.window_copy, shared)),
        Part("pinned staging buffers", 0, each.staging),
        Part("CUDA and NCCL, outside the total", 0 if shared else reserved),
    ]
    return [row for row in rows if row.device or row.host]


def _at(size: int, on_device: bool) -> tuple[int, int]:
    return (size, 0) if on_device else (0, size)


def parts_text(who: str, each: Footprint, reserved: int) -> list[str]:
    """Return `parts` as lines of text with their total. `who` names the stage or stages."""
    rows = parts(each, reserved)
    width = max(len(row.name) for row in rows)
    title = f"GiB per rank of {who}"
    head = f"{title:{width}s}  {'memory' if each.shared else 'GPU':>7s}"
    lines = [head if each.shared else f"{head}  {'host':>7s}"]
    for row in [*rows, Part("total", each.device, each.host)]:
        line = f"{row.name:{width}s}  {_gib(row.device)}"
        lines.append((line if each.shared else f"{line}  {_gib(row.host)}").rstrip())
    return [*lines, "the step and each 'or' come one after another: only the largest counts"]


def _gib(size: int) -> str:
    return f"{size / GIB:7.2f}" if size else " " * 7


def parts_json(each: Footprint, reserved: int) -> Sequence[dict[str, object]]:
    """Return `parts` as plain values for JSON, in bytes."""
    return [
        {"part": row.name, "device": row.device, "host": row.host} for row in parts(each, reserved)
    ]
