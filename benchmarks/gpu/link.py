"""Two sites on one GPU and a link on which gradients take many times as long as a step.

Both sites share the GPU in every measurement, with and without a network, so the shares compare
equal work. Without a network only the time counts in which both train. The kernel paces every
connection (SO_MAX_PACING_RATE), which needs neither namespaces nor `tc`. `gradients_over_step` says
what the link really was.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu import product, runs, sizes
from benchmarks.gpu.child import Context, Outcome

SITES = ("north", "south")
RATIO = {"gpu": 400, "cpu": 20, "tiny": 5}
"""Time of an exchange of gradients over the time of a step."""
ALONE_STEPS = {"gpu": 30, "cpu": 10, "tiny": 4}
"""Inner steps of a round of the sites without a network."""
STEPS = {"gpu": 240, "cpu": 40, "tiny": 12}
"""Inner steps of a run over the link. The first half is not measured."""
ALONE_ROUNDS = 6
TOGETHER = 1 / 3
"""Least part of the measured time of the sites without a network in which both must train."""
NONE = {"method": "diloco", "slots": 1, "overlap": "none"}


@dataclass
class Bench:
    """Two sites on this machine's loopback interface."""

    context: Context
    notes: dict[str, float] = field(default_factory=dict)
    """Tokens/s of both sites by measurement; seconds of a step; bits per second of the link."""

    def path(self, name: str, **sections: Any) -> Path:
        """Write the run file of a measurement and return its path."""
        context = self.context
        return sizes.run_file(
            context.folder, name, sizes.LINK[context.scale], context.shared, context.scale,
            **{
                "checkpoint": {"every_rounds": 0},
                "network": {"link_timeout": 600.0},
                **sections,
            },
        )  # fmt: skip

    def alone(self, name: str, outer: dict[str, Any]) -> float:
        """Return tokens/s of both sites together, each in a run of its own at the same time."""
        # Neither of two concurrent runs knows of the other, and each would take all cores.
        cores = len(os.sched_getaffinity(0))
        threads = {"threads": max(1, cores // len(SITES))}
        started = []
        for site in SITES:
            path = sizes.run_file(
                self.context.folder, f"{name}-{site}", sizes.LINK[self.context.scale],
                self.context.shared, self.context.scale, sites=(site,), outer=outer,
                checkpoint={"every_rounds": 0}, site=threads,
            )  # fmt: skip
            log = self.context.folder / f"{name}-{site}.log"
            started.append(runs.begin("train", path, "--overwrite", log=log))
        try:
            codes = [each.wait(runs.LONGEST) for each in started]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the sites alone take more than {runs.LONGEST:.0f} s") from None
        finally:
            for each in started:
                each.kill()
        if any(codes):
            raise RuntimeError(f"the sites alone: exit codes {codes}")
        folders = {site: self.context.folder / f"{name}-{site}" for site in SITES}
        found = speed_together(folders, 1)
        if found is None and self.context.cuda:
            raise RuntimeError("the sites alone hardly trained at the same time")
        # On a CPU the runs are shorter than the differences of their starts.
        return found or sum(speed(folder, site, 1) for site, folder in folders.items())

    def together(self, name: str, bits: float, **sections: Any) -> Path:
        """Train both sites in one run over a link of `bits` per second, and return the run
        folder."""
        path = self.path(name, **sections)
        with product.paced(bits):
            runs.train(path)
        return path.parent / name


def speed(folder: Path, site: str, first: int) -> float:
    """Return tokens/s by wall-clock time in the rounds from `first` on.

    The last round is left out if there are others: it is cut, and nothing hides in it.
    """
    every = sorted(runs.rounds(folder, site), key=lambda each: each["round"])
    later = [each for each in every if each["round"] >= first]
    later = later[:-1] if len(later) > 2 else later
    before = [each for each in every if each["round"] < later[0]["round"]]
    if not before:
        return float(later[-1]["tokens_per_second"])
    seconds = later[-1]["time"] - before[-1]["time"]
    return float(sum(each["tokens"] for each in later) / seconds)


def speed_together(folders: Mapping[str, Path], first: int) -> float | None:
    """Return the tokens/s of all sites together, from the rounds from `first` on.

    `folders`: the folder of each site's own run. Only the time counts in which all sites train: a
    site that has begun earlier has the GPU for itself until then. None if this time is too short.
    """
    courses = []
    for site, folder in folders.items():
        every = sorted(runs.rounds(folder, site), key=lambda each: each["round"])
        every = every[:-1] if len(every) - first > 2 else every
        courses.append(common.course_of(every)[first - 1 :])
    begin, end = max(each[0][0] for each in courses), min(each[-1][0] for each in courses)
    longest = max(each[-1][0] - each[0][0] for each in courses)
    if end - begin < TOGETHER * longest:
        return None
    tokens = (common.tokens_at(each, end) - common.tokens_at(each, begin) for each in courses)
    return sum(tokens) / (end - begin)


def first_after(folder: Path, steps: int) -> int:
    """Return the first round that begins after `steps` inner steps."""
    for each in runs.rounds(folder, SITES[0]):
        if each["step"] - each["steps"] >= steps:
            return int(each["round"])
    return 1


def gradient_bits(parameters: int) -> float:
    """Return the bits on the link of each of two sites for one AllReduce of fp32 gradients."""
    return 32.0 * parameters * 2 * (len(SITES) - 1) / len(SITES)


def run(context: Context) -> None:
    """Measure four rows. The first is measured in any case, because the rate of the link follows
    from it."""
    product.prepare(Bench(context).path("data"), context.shared)
    bench = Bench(context)
    if context.wants("link, no network"):
        context.check("link, no network", lambda: no_network(bench))
    else:
        no_network(bench)
    if "bits" not in bench.notes:
        for name in context.wanted:
            context.check(name, lambda: Outcome(False, "no speed without a network"))
        return
    pinned = {"inner_steps": 2}
    context.check("link, two steps", lambda: over_link(bench, "two-steps", pinned))
    context.check("link, allreduce", lambda: allreduce(bench))
    context.check("link, as shipped", lambda: over_link(bench, "as-shipped", {}))


def no_network(bench: Bench) -> Outcome:
    """Measure tokens/s without a network, and set the rate of the link with the ratio `RATIO`."""
    scale = bench.context.scale
    outer = {**NONE, "inner_steps": ALONE_STEPS[scale], "rounds": ALONE_ROUNDS}
    found = bench.alone("alone", outer)
    shape = sizes.LINK[scale]
    step = len(SITES) * shape.tokens / found
    parameters = product.parameters_of(shape, bench.context.cuda)
    bits = gradient_bits(parameters) / (RATIO[scale] * step)
    bench.notes |= {"alone": found, "step": step, "bits": bits}
    figures = {
        "tokens_per_second": found,
        "step_ms": 1e3 * step,
        "parameters": parameters,
        "link_mbit_s": bits / 1e6,
        "ratio": RATIO[scale],
    }
    return Outcome(None, "two sites at once, link by paced connections", figures)


def rate_text(bits: float) -> str:
    """Return a rate as a run file writes it."""
    return f"{bits / 1e6:.3f}mbit" if bits >= 1e6 else f"{bits / 1e3:.3f}kbit"


def over_link(bench: Bench, name: str, outer: dict[str, Any]) -> Outcome:
    """Measure dilocox with a declared link and its outer state on the model's device."""
    scale, bits = bench.context.scale, bench.notes["bits"]
    keys = {"steps": STEPS[scale], "device": "model", **outer}
    raw = {"outer": keys, "control": {"link": rate_text(bits)}}
    folder = bench.together(name, bits, **raw)
    first = first_after(folder, STEPS[scale] // 2)
    found = sum(speed(folder, site, first) for site in SITES)
    bench.notes[name] = found
    later = [r for site in SITES for r in runs.rounds(folder, site) if r["round"] >= first]
    figures = {
        "tokens_per_second": found,
        "share_of_no_network": found / bench.notes["alone"],
        "steps_per_round": statistics.median(r["steps"] for r in later),
        "wait_share": sum(r["wait_seconds"] for r in later) / sum(r["seconds"] for r in later),
        "payload_bytes_per_round": statistics.median(r["payload_bytes"] for r in later),
        "fewer_bytes_than_allreduce": statistics.median(r["ratio_per_token"] for r in later),
    }
    plans = [r for r in runs.records(folder) if r["kind"] == "plan"]
    said = f"{plans[-1]['codec']}, {plans[-1]['fragments']} fragments" if plans else ""
    return Outcome(None, said, figures)


def allreduce(bench: Bench) -> Outcome:
    """Measure synchronous training over the same link, in its second step."""
    shape = sizes.LINK[bench.context.scale]
    outer = {"method": "allreduce", "inner_steps": 1, "rounds": 2}
    folder = bench.together("allreduce", bench.notes["bits"], outer=outer)
    alone, ends = bench.notes["alone"], {site: runs.rounds(folder, site) for site in SITES}
    found = sum(each[1]["tokens"] / (each[1]["time"] - each[0]["time"]) for each in ends.values())
    figures = {
        "tokens_per_second": found,
        "share_of_no_network": found / alone,
        "gradients_over_step": len(SITES) * shape.tokens / found / bench.notes["step"],
        "payload_bytes_per_step": ends[SITES[0]][1]["payload_bytes"],
    }
    # An earlier process may have measured two steps, at its own speed without a network.
    earlier = bench.context.known.get("link, two steps", {}).get("share_of_no_network")
    share = bench.notes["two-steps"] / alone if "two-steps" in bench.notes else earlier
    if share is not None:
        figures["two_steps_over_allreduce"] = share / figures["share_of_no_network"]
    return Outcome(None, "", figures)
