"""Simulates what text that differs from site to site costs, and what sites share of second moments.

The simulation is that of `benchmarks.loss_length`. --domains names four text files, one per site;
with --iid each site has all of them. Of every 25 blocks of 4,096 bytes one is held out.

A row is one plan at one inner rate, with one way to share second moments (`run.Moments`). `gap` is
the loss over the lowest loss of synchronous training with the same text and length, less one; so
synchronous training is tuned, and the rate of each row is its own. Outer rates are those of the
controller's table. A row takes half a minute on one idle core.

Rows are written as they are made; started again with the same --json, the benchmark continues.
--quick has the plans of one number of bytes alone.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.loss_length.command import gap_of, loss_of, made
from benchmarks.loss_length.model import SITES, Text
from benchmarks.loss_length.run import SYNCHRONOUS, Moments, Outside, Plan, reduction, train

STEPS = 2500
SEED = 0
BLOCK, EVERY = 4096, 25
"""Bytes of a block of text, and number of blocks of which one is held out."""
DOMAIN_BYTES = 1_500_000
"""Largest number of bytes that are used of each domain."""
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
PLANS: Sequence[tuple[Plan, Moments]] = (
    (Plan(0, ""), "none"),
    (Plan(2, "topk:7"), "none"),
    (Plan(2, "topk:7"), "rows"),
    (Plan(2, "topk:7"), "factored"),
    (Plan(2, "topk:28"), "rows"),
    (Plan(2, "topk:28"), "factored"),
    (Plan(8, "topk:28"), "rows"),
    (Plan(8, "topk:28"), "factored"),
    (Plan(2, "none"), "rows"),
    (Plan(2, "none"), "factored"),
)


@dataclass(frozen=True)
class Job:
    """One row to make."""

    plan: Plan
    moments: Moments
    rate: float
    iid: bool

    @property
    def key(self) -> dict[str, object]:
        """The fields that identify the row, beside the text."""
        return {
            "plan": self.plan.name, "moments": self.moments, "rate": self.rate, "iid": self.iid,
            "steps": STEPS, "seed": SEED,
        }  # fmt: skip


def is_of(row: common.Row, job: Job) -> bool:
    """Return whether `row` is the result of `job`, with the outer values of the table of today.

    Rows of earlier versions do not name these values.
    """
    outer = asdict(Outside.of_table(job.plan, STEPS))
    return row.items() >= job.key.items() and all(row.get(k, v) == v for k, v in outer.items())


def divided(content: bytes) -> tuple[bytes, bytes]:
    """Return the text to train on, and the held-out text."""
    blocks = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)]
    train_on = [block for number, block in enumerate(blocks) if number % EVERY]
    return b"".join(train_on), b"".join(blocks[::EVERY])


@functools.cache
def read(domains: tuple[Path, ...], iid: bool) -> Text:
    """Return the text of each site. Raises `OSError`."""
    return Text.of([divided(_content(path)) for path in domains], iid)


def _content(path: Path) -> bytes:
    return path.read_bytes()[:DOMAIN_BYTES]


def make(domains: tuple[Path, ...], job: Job) -> common.Row:
    """Make a row. A run that diverged has the loss None."""
    began, commit = time.monotonic(), common.commit()
    text, outside = read(domains, job.iid), Outside.of_table(job.plan, STEPS)
    loss = train(text, job.plan, job.rate, STEPS, SEED, outside, job.moments)
    return {
        **job.key, **asdict(outside), "loss": loss if math.isfinite(loss) else None,
        "reduction": reduction(job.plan), "seconds": round(time.monotonic() - began, 1),
        "commit": commit,
    }  # fmt: skip


def report(rows: Sequence[common.Row]) -> str:
    """Return the row of the best inner rate, for all that differs otherwise, as a table."""
    best: dict[tuple[object, ...], common.Row] = {}
    outer = [field.name for field in fields(Outside)]
    ordered = sorted(rows, key=loss_of, reverse=True)
    for row in ordered:
        best[row["iid"], row["plan"], row["moments"], *map(row.get, outer)] = row
    base = {row["iid"]: row for row in ordered if row["plan"] == SYNCHRONOUS}
    lines = [
        {**row, "gap": gap_of(row, base.get(row["iid"]))}
        for row in sorted(best.values(), key=lambda row: (row["iid"], loss_of(row)))
    ]
    columns: dict[str, Any] = {
        "iid": str, "plan": "s", "moments": "s", "reduction": ",.0f", "rate": "g", "loss": ".4f",
        "gap": "+.1%",
    }  # fmt: skip
    return common.table(lines, columns)


def main() -> int:
    """Make what is missing, print and write the rows. Returns the exit code."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--domains", nargs=SITES, type=Path, required=True, metavar="FILE")
    parser.add_argument("--iid", action="store_true", help="the same text at all sites")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--plans", nargs="+", metavar="NAME", help="such as 'H=2 topk:7'")
    options = parser.parse_args()
    common.end_on_signals()
    names = list(dict.fromkeys(plan.name for plan, _ in PLANS))
    for name in options.plans or ():
        if name not in names:
            parser.error(f"--plans {name!r}: there are {', '.join(names)}")
    missing = [str(path) for path in options.domains if not path.is_file()]
    if common.cannot("loss_length.mixed", f"no such file: {missing[0]}" if missing else None):
        return common.CANNOT
    domains = tuple(path.resolve() for path in options.domains)
    texts = [hashlib.sha256(_content(path)).hexdigest() for path in domains]
    on = common.machine()
    settings = {
        "sites": SITES, "steps": STEPS, "domains": [path.stem for path in domains], "sha256": texts
    }  # fmt: skip
    rows = common.read_rows(options.json, "loss_length_mixed", settings)
    wanted = [
        Job(plan, moments, rate, options.iid)
        for plan, moments in (PLANS[:4] if options.quick else PLANS)
        for rate in options.rates
        if not options.plans or plan.name in options.plans
    ]
    wanted = [job for job in wanted if not any(is_of(row, job) for row in rows)]
    for row in made(functools.partial(make, domains), wanted, on["cores"]):
        rows.append(row)
        common.say(f"{row['plan']}, {row['moments']}, {row['rate']:g}: {loss_of(row):.4f}")
        if options.json is not None:
            common.write_json(options.json, "loss_length_mixed", on, settings, rows)
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
