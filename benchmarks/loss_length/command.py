"""Simulates the loss that plans cost in runs of different length, at four sites of a small model.

The cost of local steps shrinks in longer runs; that of a sparse codec shrinks less. The
controller's loss table therefore has both lengths that are simulated here. Real runs of the engine
that are long enough take half an hour or more each (`benchmarks.quality --regime long`); a
simulation takes a minute or two. It is not the engine: four copies of a byte-level transformer of
0.06M parameters train in one process, in one batched computation. They exchange through the
engine's codecs, with residuals as in docs/algorithm.md, in one fragment, by the overlap rule
`keep`. A batch has 4 sequences of 48 bytes per site and step. The text is Python's standard
library: a contiguous quarter per site, or all of it at each site (--iid).

A row is one plan at one length and one inner learning rate. The shortest runs try four rates;
longer ones try the best rate of the shorter ones and half of it; --rates sets others. Outer rates,
beta and lambda (`gamma`, `mu`, `beta`, `view`) are those of the controller's table, unless --gamma
and the other options set them. The table has a line for each plan and outer values, at their best
inner rate. `gap` is the held-out loss over that of synchronous training of the same length and seed
at its best rate, less one. `reduction` is the bytes that synchronous training
sends over the bytes that the plan sends to three other sites (`gather`), without the flush.

Rows are written as they are made; started again with the same --json, the benchmark continues. A
full run takes about an hour on two cores; --quick makes the shortest length of four plans.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any, TypeVar

import torch

from benchmarks import common
from benchmarks.loss_length.model import BATCH, HELD_OUT, LENGTH, SITES, Text, shapes
from benchmarks.loss_length.run import SYNCHRONOUS, Outside, Plan, reduction, train
from dilocox.errors import DilocoxError
from dilocox.utils import processes

J = TypeVar("J")
NAME = "loss_length"
RESULTS = common.RESULTS / "loss_length-cpu.json"
LENGTHS = (640, 3300)
"""Inner steps of the runs."""
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
"""Inner rates of the shortest runs. Longer runs have the best rate of the shorter ones, and half of
it."""
PLANS = (
    (1, "topk:20"), (2, "topk:8"), (2, "topk:17"), (5, "topk:7"), (5, "topk:24"), (5, "topk:58"),
    (2, "top1:512"), (5, "top1:600"),
    (8, "topk:13"), (12, "topk:23"), (12, "topk:64"), (20, "topk:41"), (20, "topk:328"),
    (30, "topk:64"), (30, "topk:164"), (20, "none"), (66, "int2"), (125, "int4"), (125, "int2"),
)  # fmt: skip
QUICK = ((2, "topk:17"), (20, "none"), (30, "topk:64"))


@dataclass(frozen=True)
class Job:
    """One row to make."""

    plan: Plan
    steps: int
    rate: float
    seed: int
    outside: Outside
    iid: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that identify a row."""
        return self.plan.name, self.steps, self.rate, self.seed, self.iid, *astuple(self.outside)


def key_of(row: common.Row) -> tuple[object, ...]:
    """Return the `Job.key` of a row."""
    named = ("plan", "steps", "rate", "seed", "iid", *(field.name for field in fields(Outside)))
    return tuple(row[name] for name in named)


def jobs(
    rows: Sequence[common.Row],
    plans: Sequence[Plan],
    lengths: Sequence[int],
    seed: int,
    given: Sequence[float] = (),
    outside: Mapping[str, float] | None = None,
    iid: bool = False,
) -> list[Job]:
    """Return the jobs that are missing among `rows` and can be made now, the shortest runs first.

    A longer run needs the best rate of the length before, so all rows of that length.

    Args:
        rows: rows made so far.
        plans: plans to simulate.
        lengths: inner steps of the runs, ascending.
        seed: seed of the runs.
        given: inner rates for all lengths. Empty: the rates are searched.
        outside: values that replace those of the controller's table.
        iid: all sites have the same text.
    """
    made, found = {key_of(row) for row in rows}, []
    for plan in plans:
        for number, steps in enumerate(lengths):
            rates: Sequence[float] = given or RATES
            wanted = _outside(plan, steps, outside)
            if number and not given:
                shorter = lengths[number - 1]
                before = Job(plan, shorter, 0.0, seed, _outside(plan, shorter, outside), iid)
                best_rate = _best_rate(rows, before)
                rates = (best_rate, best_rate / 2)
            missing = [Job(plan, steps, rate, seed, wanted, iid) for rate in rates]
            missing = [job for job in missing if job.key not in made]
            found += missing
            if missing:
                break
    return sorted(found, key=lambda job: job.steps)


def _outside(plan: Plan, steps: int, given: Mapping[str, float] | None) -> Outside:
    """Return the outer values of a plan: those of the table, or what `given` has instead."""
    usual = Outside.of_table(plan, steps)
    return replace(usual, **given) if plan.inner_steps and given else usual


def _best_rate(rows: Sequence[common.Row], job: Job) -> float:
    """Return the best inner rate of the runs that differ from `job` in this rate only."""
    same = [row for row in rows if key_of({**row, "rate": job.rate}) == job.key]
    return float(min(same, key=loss_of)["rate"])


def _compared(row: common.Row) -> tuple[object, ...]:
    """Return the fields that are equal in rows that may be compared with each other."""
    return row["steps"], row["seed"], row["iid"]


def loss_of(row: common.Row) -> float:
    """Return the row's loss; infinity if the run has diverged."""
    return math.inf if row["loss"] is None else float(row["loss"])


def gap_of(row: common.Row, base: common.Row | None) -> float | None:
    """Return the loss over that of `base`, less one. None if one of the two has no loss."""
    if base is None or row["loss"] is None or base["loss"] is None:
        return None
    return float(row["loss"] / base["loss"] - 1)


def best(rows: Sequence[common.Row]) -> list[common.Row]:
    """Return the row of the best inner rate, with its gap, for all that differs otherwise.

    Rows of other outer values are lines of their own: the best of many values tried by hand cannot
    be compared with a plan of which one was tried.
    """
    chosen: dict[tuple[object, ...], common.Row] = {}
    for row in sorted(rows, key=loss_of, reverse=True):
        chosen[key_of({**row, "rate": None})] = row
    bases = {_compared(row): row for row in chosen.values() if row["plan"] == SYNCHRONOUS}
    found = [{**row, "gap": gap_of(row, bases.get(_compared(row)))} for row in chosen.values()]
    return sorted(found, key=lambda row: (row["iid"], row["steps"], row["seed"], row["reduction"]))


_text = functools.cache(Text.read)


def text_digest(iid: bool) -> str:
    """Return the SHA-256 of the text. The text is another one in another version of Python."""
    text = _text(iid)
    digest = hashlib.sha256()
    for part in (*text.parts, text.held_out):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _make(job: Job) -> common.Row:
    text, commit = _text(job.iid), common.commit()
    began = time.monotonic()
    found = train(text, job.plan, job.rate, job.steps, job.seed, job.outside)
    return {
        "plan": job.plan.name,
        "inner_steps": job.plan.inner_steps,
        "codec": job.plan.codec,
        "steps": job.steps,
        "rate": job.rate,
        "seed": job.seed,
        "iid": job.iid,
        **asdict(job.outside),
        "loss": found if math.isfinite(found) else None,
        "reduction": reduction(job.plan),
        "seconds": round(time.monotonic() - began, 1),
        "text": text_digest(job.iid),
        "commit": commit,
        "date": common.today(),
    }


def made(
    make: Callable[[J], common.Row], wanted: Sequence[J], workers: int
) -> Iterator[common.Row]:
    """Make the rows of the jobs by `make`, in processes, and yield each when it is complete.

    The processes end with the caller: a row takes minutes, and nobody would write it.
    """
    context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    with ProcessPoolExecutor(workers, context, _begin, (os.getpid(),)) as pool:
        try:
            for done in as_completed([pool.submit(make, job) for job in wanted]):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                if worker not in others:
                    worker.kill()
            raise


def _begin(parent: int) -> None:
    processes.die_with(parent)
    torch.set_num_threads(1)


def report(rows: Sequence[common.Row]) -> str:
    """Return the best rows as a table."""
    return common.table(
        best(rows),
        {
            "steps": ",d", "seed": "d", "iid": str, "plan": str, "reduction": ",.0f", "rate": "g",
            "gamma": "g", "mu": "g", "beta": "g", "view": "g", "loss": ".3f", "gap": "+.1%",
            "seconds": ".0f",
        },
    )  # fmt: skip


def plan(text: str) -> Plan:
    """Return the plan that the command line writes as H:CODEC.

    Raises `argparse.ArgumentTypeError`.
    """
    steps, _, codec = text.partition(":")
    if not steps.isdecimal() or (int(steps) > 0 and not codec):
        raise argparse.ArgumentTypeError(f"{text}: write H:CODEC, such as 2:topk:17")
    made = Plan(int(steps), codec)
    try:
        reduction(made)
    except DilocoxError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return made


def main() -> int:
    """Make what is missing, print and write the rows. Returns the exit code."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--steps", type=common.positive, nargs="+", metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="instead of searching")
    parser.add_argument(
        "--plans", type=plan, nargs="+", metavar="H:CODEC",
        help="such as 2:topk:17; 0: synchronous training",
    )  # fmt: skip
    parser.add_argument("--iid", action="store_true", help="the same text at all sites")
    for field in fields(Outside):
        parser.add_argument(f"--{field.name}", type=float, help="instead of the controller's")
    options = parser.parse_args()
    common.end_on_signals()
    if options.quick and options.steps:
        parser.error("--quick: makes the shortest length; leave out --steps")
    given = {field.name: getattr(options, field.name) for field in fields(Outside)}
    outside = {name: value for name, value in given.items() if value is not None}
    path = options.json or (None if options.quick else RESULTS)
    plans = [Plan(0, ""), *itertools.starmap(Plan, QUICK if options.quick else PLANS)]
    plans = options.plans or plans
    lengths = [LENGTHS[0]] if options.quick else sorted(set(options.steps or LENGTHS))
    on = common.machine()
    settings: Mapping[str, Any] = {
        "sites": SITES, "parameters": sum(map(math.prod, shapes().values())), "batch": BATCH,
        "sequence_length": LENGTH, "held_out": SITES * HELD_OUT,
    }  # fmt: skip
    rows = common.read_rows(path, NAME, settings)
    if jobs(rows, plans, lengths, options.seed, options.rates, outside, options.iid):
        common.refuse_other_text(path, rows, text_digest(options.iid), {"iid": options.iid})
    while wanted := jobs(rows, plans, lengths, options.seed, options.rates, outside, options.iid):
        for number, row in enumerate(made(_make, wanted, on["cores"])):
            rows.append(row)
            if path is not None:
                common.write_json(path, NAME, on, settings, rows)
            reached = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
            common.say(
                f"{row['steps']} steps, {row['plan']} at {row['rate']:g}: {reached}; "
                f"{row['seconds']:.0f} s, {len(wanted) - number - 1} to come"
            )
    print(report(rows))
    return 0
