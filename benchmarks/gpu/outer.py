"""Boundary and landing in rounds of two steps, with the outer state on the model's device.

The run has one site, so that no network and no second site on the GPU enter the time. The share is
that of the spans `boundary` and `landing` in the rounds after the first. On a GPU the GPU's own
clock measures them, since the host waits in these spans for the step before them. On a CPU the
run's timeline measures them. The share that everything together loses (spans, data, plans) is
measured against bare steps of the same model in the same process, after the run.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import product, runs, sizes
from benchmarks.gpu.child import Context, Outcome

ROUNDS = {"gpu": 6, "cpu": 4, "tiny": 3}
BARE_STEPS = {"gpu": 4, "cpu": 4, "tiny": 1}
SPANS = ("boundary", "landing")
HASHED = "wait for digest"


def run(context: Context) -> None:
    """Measure one row: the time of boundaries and landings."""
    context.check("boundary and landing", lambda: _outer(context))


def _outer(context: Context) -> Outcome:
    scale = context.scale
    shape = sizes.OUTER[scale]
    path = sizes.run_file(
        context.folder, "outer", shape, context.shared, scale, sites=("north",),
        outer={"rounds": ROUNDS[scale], "inner_steps": 2, "fragments": 1, "device": "model"},
        control={"adapt": "off"}, checkpoint={"every_rounds": 0}, record={"enabled": False},
    )  # fmt: skip
    product.prepare(path, context.shared)
    folder, clock = path.parent / "outer", path.parent / "spans.jsonl"
    clock.unlink(missing_ok=True)
    with product.gpu_time_of_spans(SPANS, clock) if context.cuda else contextlib.nullcontext():
        runs.train(path, trace=True)
    later = [each for each in runs.rounds(folder, "north") if each["round"] >= 1]
    by_host = seconds_of_spans(folder / "trace.json", (*SPANS, HASHED))
    spans = seconds_by_gpu(clock) if context.cuda else by_host
    stood = sum(spans.values()) / len(later)
    took = sum(each["seconds"] for each in later) / len(later)
    bare = _bare(context)
    figures: dict[str, Any] = {
        "share_of_round": stood / took,
        "round_seconds": took,
        "tokens_per_step": shape.tokens,
        "all_lost_share": 1.0 - 2.0 * bare / took,
    }
    figures |= {f"{name}_ms": 1e3 * spans[name] / len(later) for name in SPANS}
    figures |= {f"{name}_host_ms": 1e3 * by_host[name] / len(later) for name in SPANS}
    # A part of the landing: the wait for the digest of the landing before it.
    figures["digest_wait_ms"] = 1e3 * by_host[HASHED] / len(later)
    return Outcome(None, f"{product.parameters_of(shape, context.cuda):,} parameters", figures)


def seconds_by_gpu(clock: Path) -> dict[str, float]:
    """Return the GPU's seconds in `SPANS` of exchanges of the rounds from 1 on.

    `clock` is the file of `product.gpu_time_of_spans`.
    """
    found = dict.fromkeys(SPANS, 0.0)
    for line in clock.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if _counts(event["key"]):
            found[event["name"]] += event["ms"] / 1e3
    return found


def _counts(key: str) -> bool:
    kind, number = key.split("/")[:2]
    return kind == "outer" and int(number) >= 1


def seconds_of_spans(trace: Path, names: Sequence[str] = SPANS) -> dict[str, float]:
    """Return the seconds in spans of the rounds from 1 on, in a run's timeline."""
    found = dict.fromkeys(names, 0.0)
    events = json.loads(trace.read_text(encoding="utf-8"))
    for event in events["traceEvents"] if isinstance(events, dict) else events:
        if event.get("ph") != "X" or event["name"] not in found:
            continue
        # A wait for a digest is a wait for the digest of an earlier round.
        if "key" not in event["args"] or _counts(event["args"]["key"]):
            found[event["name"]] += event["dur"] / 1e6
    return found


def _bare(context: Context) -> float:
    """Return the seconds of a step of the same model and batch without a run around it."""
    from benchmarks.gpu.clock import wait

    site = product.build_site(sizes.OUTER[context.scale], context.cuda)
    site.step()
    wait(context.cuda)
    began = time.perf_counter()
    for _ in range(BARE_STEPS[context.scale]):
        site.step()
    wait(context.cuda)
    return (time.perf_counter() - began) / BARE_STEPS[context.scale]
