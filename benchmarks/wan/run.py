"""One measurement of the WAN benchmark: a run of the engine in a lab, with or without exchange."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dilocox
from benchmarks.wan.grid import (
    MODEL,
    NO_EXCHANGE,
    NO_EXCHANGE_ROUNDS,
    SEQUENCE_LENGTH,
    SITES,
    VOCABULARY,
    Extent,
    Method,
    Settings,
    batch,
)
from dilocox.config.run_config import RunConfig
from dilocox.tools.testbed import Lab, LabError
from dilocox.tools.testbed.results import Record, RunResult, rounds_by_site
from dilocox.tools.testbed.run import Run, check, finish, in_lab, run_alone
from dilocox.tools.testbed.shaping import FRAME_BYTES

Row = dict[str, Any]
LINK_TIMEOUT = 1800.0
"""Link time-out in seconds. The whole model in fp32 takes minutes on the slowest link."""
LEAST_QUEUE = 32
"""Number of frames in the queue of a slow link (see `dilocox.tools.testbed.shaping`)."""
MOST_EFFICIENT = 1.2
"""Largest efficiency that is reported. The shaper's bucket of 10 ms and the first frame let a
payload of a few frames seem faster than the link."""
HEARTBEAT, QUEUES = 5.0, 20
"""Heartbeat in seconds: dilocox's default, or `QUEUES` times the delay of a full queue of the link
if that is longer (below 1.6 Mbit/s)."""


def configuration(
    folder: Path, sites: int, settings: Settings, steps: int, link: float = math.inf
) -> RunConfig:
    """Return the run file of a measurement, with as little work besides training as possible.

    `link`: bits per second that every site has. Raises `ConfigError`.
    """
    queue = LEAST_QUEUE * FRAME_BYTES * 8 / link
    raw: dict[str, Any] = {
        "run": {"name": "wan", "folder": str(folder / "run")},
        "model": {"architecture": dict(MODEL)},
        "data": {
            "source": "python-stdlib",
            "folder": str(folder / "data"),
            "vocabulary_size": VOCABULARY,
            "sequence_length": SEQUENCE_LENGTH,
            "max_documents": 200,
            "validation_sequences": 2,
        },
        "site": {
            "batch_size": batch(sites),
            "micro_batch_size": batch(sites),
            "threads": 1,
            "device": "cpu",
            "precision": "fp32",
        },
        "outer": {"steps": steps},
        "network": {
            "link_timeout": LINK_TIMEOUT,
            "heartbeat": max(HEARTBEAT, round(QUEUES * queue, 1)),
        },
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "sites": {name: {} for name in SITES[:sites]},
    }
    for key, value in settings.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value
    return dilocox.resolve_run(raw, where="wan benchmark")


def engine_settings(method: Method, sites: int) -> Settings:
    """Return the run-file keys of a method.

    With more than two sites dense vectors are averaged in parts, as in an all-reduce. With two
    sites both ways send the same bytes.
    """
    settings = dict(method.settings)
    dense = method.bits > 8 and not method.overlaps
    if sites > 2 and dense:
        settings["outer.exchange"] = "reduce"
    if "outer.inner_steps" not in settings and not method.adapts:
        settings["outer.inner_steps"] = method.inner_steps
    return settings


def measure_none(
    lab: Lab,
    folder: Path,
    rounds: int = NO_EXCHANGE_ROUNDS,
    inner_steps: int = int(NO_EXCHANGE["outer.inner_steps"]),
) -> Row:
    """Measure every site in a run of its own at the same time, without exchange.

    Returns the row. The first round is warm-up.
    """
    steps = rounds * inner_steps
    settings = {**NO_EXCHANGE, "outer.inner_steps": inner_steps}
    config = configuration(folder, len(lab.sites), settings, steps, slowest(lab))
    found = run_alone(lab, config, overwrite=True, warm_up=1)
    return {
        "tokens_per_second": sum(result.tokens_per_second for result in found.values()),
        "seconds": statistics.fmean(result.window.seconds for result in found.values()),
        "steps": steps - inner_steps,
        "inner_steps": inner_steps,
        "wire_bytes": statistics.fmean(
            site.wire_per_round for result in found.values() for site in result.sites.values()
        ),
    }


def slowest(lab: Lab) -> float:
    """Return the bits per second of the slowest uplink."""
    rates = [lab.links.line(site).up for site in lab.sites]
    return min((rate for rate in rates if rate is not None), default=math.inf)


def measure_engine(
    lab: Lab,
    folder: Path,
    method: Method,
    ratio: float,
    extent: Extent,
    trace: bool = False,
    limit: float | None = None,
) -> Row:
    """Measure all sites in one run of a method, and return the row.

    Raises `LabError`, also if the run takes more than `limit` seconds.
    """
    settings = engine_settings(method, len(lab.sites))
    warm_up, steps = extent_of(method, ratio, extent)
    return measure_run(lab, folder, settings, steps, warm_up, trace, limit)


def extent_of(method: Method, ratio: float, extent: Extent) -> tuple[int | None, int]:
    """Return the number of rounds that are not measured, and the inner steps of a run.

    The number of rounds may be None: see `measure_run`.
    """
    if method.adapts:
        return None, extent.ours_steps
    cycles = method.warm_up + method.cycles(ratio, extent.least_steps)
    return method.warm_up, method.inner_steps * cycles


def measure_run(
    lab: Lab,
    folder: Path,
    settings: Settings,
    steps: int,
    warm_up: int | None = None,
    trace: bool = False,
    limit: float | None = None,
) -> Row:
    """Measure all sites in one run, and return the row.

    `warm_up`: number of rounds that are not measured. None: the first half of the steps. Raises
    `LabError`, also if the run takes more than `limit` seconds.
    """
    config = in_lab(lab, configuration(folder, len(lab.sites), settings, steps, slowest(lab)))
    check(config)
    checked = lab.verify()
    run = Run(lab, config, overwrite=True, trace=trace)
    finish(lab, [run], limit=limit)
    run.new_records()
    if warm_up is None:
        warm_up = first_after(run.records, lab.sites, steps // 2)
    link = statistics.fmean(one.bits_per_second for one in checked.links)
    return engine_row(run.result(warm_up), link)


def first_after(records: Sequence[Record], sites: Sequence[str], steps: int) -> int:
    """Return the first round that begins after `steps` inner steps. Measurement begins there."""
    for record in rounds_by_site(records, sites)[sites[0]]:
        if record["step"] - record["steps"] >= steps:
            return int(record["round"])
    raise LabError(f"no round begins after {steps} inner steps: the run is too short")


def engine_row(result: RunResult, link: float) -> Row:
    """Return the result row of a run on links of `link` bits per second."""
    window = result.window
    measured = [
        record
        for record in result.records
        if record["kind"] == "round"
        and record.get("site")
        and window.first <= record["round"] <= window.last
    ]
    received = sum(record["link_bytes"] for record in measured)
    receiving = sum(record["link_seconds"] for record in measured)
    sites = len(result.sites)
    return {
        "tokens_per_second": result.tokens_per_second,
        "seconds": window.seconds,
        "steps": sum(record["steps"] for record in measured) // sites,
        "inner_steps": sum(record["steps"] for record in measured) / len(measured),
        "payload_bytes": statistics.fmean(s.payload_per_round for s in result.sites.values()),
        "wire_bytes": statistics.fmean(s.wire_per_round for s in result.sites.values()),
        "wait_share": statistics.fmean(s.wait_share for s in result.sites.values()),
        "work_share": sum(r["exchange_work_seconds"] for r in measured) / sites / window.seconds,
        "efficiency": efficiency(received, receiving, link),
        "plan": plans(result.records, window.first, window.last),
        "reason": last_reason(result.records, window.last),
    }


def efficiency(received: float, seconds: float, link: float) -> float | None:
    """Return the received payload bits over the capacity of a link in `seconds`.

    `link` is in bits per second. None if payloads are so small that the shaper's bucket passes them
    at once.
    """
    found = received * 8 / (link * seconds) if seconds else None
    return None if found is None or found > MOST_EFFICIENT else found


def plan_text(plan: Mapping[str, Any]) -> str:
    """Return a plan in few words."""
    return f"{plan['codec']} H={plan['inner_steps']} F={plan['fragments']} delay={plan['delay']}"


def plans(records: Sequence[Record], first: int, last: int) -> str:
    """Return the plans of rounds `first` to `last`, each with its number of rounds, by first
    use."""
    changes = [record for record in records if record["kind"] == "plan"]
    ends = [change["round"] for change in changes[1:]] + [last + 1]
    counts: dict[str, int] = {}
    for change, end in zip(changes, ends, strict=False):
        rounds = min(end, last + 1) - max(change["round"], first)
        if rounds > 0:
            name = plan_text(change)
            counts[name] = counts.get(name, 0) + rounds
    return ", ".join(f"{name} x{count}" for name, count in counts.items())


def last_reason(records: Sequence[Record], last: int) -> str:
    """Return the controller's reason for the plan of round `last`."""
    said = [r for r in records if r["kind"] == "plan" and r["round"] <= last and r.get("reason")]
    return str(said[-1]["reason"]) if said else ""
