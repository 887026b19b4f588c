"""Measures the speed of `dilocox` on a slow link against sites without a network at the same time.

`benchmarks.wan` measures one run after another. On a machine whose speed changes by a fifth from
minute to minute, such as a shared virtual one, a share of 97 % cannot be seen that way. Here four
hosts of one lab train at the same time, each with a quota of a quarter of 90 % of the machine. Two
sites train in one run over their links. The other two train by themselves, without a codec, with an
outer step every 100 inner steps. If steps are eight times as long, an outer step comes every 12
inner steps, which costs about 0.3 % of the speed. The machine thus affects both pairs equally. The
roles of the hosts change from block to block.

The link is that of `benchmarks.wan`: 2 fp32 gradients of the model take 400 times as long on it as
a step, or as many times as `--ratio` says. `share` is the tokens/s of the first two sites over
those of the others. It is measured in rounds of the others in the second part of the run, since the
controller measures the link before. A last round that is cut to the remaining steps does not count,
because nothing is hidden in it. Figures are medians over blocks, with bootstrap intervals.

`--work` sets `control.work`, the largest share of the processor that exchanges may take. On this
machine no core is idle, so exchanges take their time from inner steps. A smaller share makes rounds
longer, and so do small steps, because every exchange has a fixed cost. `--batch` is the sequences
per step and site, `--width` the model's hidden size; runs have fewer steps in proportion. The rows
have the plans; `benchmarks.quality` measures their loss.

`--allreduce N` also measures the speed-up: after the blocks, two of the same hosts take N steps of
synchronous training over the same links, after one step that is not measured. Such a step takes
longer than a step without a network by the link's ratio.

Every block is written when it is done; started again with the same --json on the same machine, the
benchmark continues. Eight blocks take three quarters of an hour; --quick makes two blocks. Blocks
need the same as `dilocox lab`; otherwise it prints one line and exits with code 3.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Course, course_of, tokens_at
from benchmarks.wan import run as wan_run
from benchmarks.wan.grid import (
    MODEL,
    NO_EXCHANGE,
    OURS,
    RATIO,
    RATIOS,
    SEQUENCE_LENGTH,
    SITES,
    SYNCHRONOUS,
    VOCABULARY,
    Settings,
    link_of,
    synchronous_bits,
)
from dilocox.config.run_config import RunConfig
from dilocox.errors import DilocoxError
from dilocox.models import count_parameters, load_model_config
from dilocox.tools.testbed import Checked, Lab, LabError
from dilocox.tools.testbed.results import RunResult, rounds_by_site
from dilocox.tools.testbed.run import Run, alone, check, finish, in_lab, of_sites, run_alone
from dilocox.tools.testbed.testbed import unsupported_reason

RESULTS = common.RESULTS / "wan-beside-cpu.json"
BLOCKS, QUICK_BLOCKS = 8, 2
BATCH = 8
"""Sequences per step and site, as in `benchmarks.wan` with two sites."""
WIDTH = int(MODEL["hidden_size"])
STEPS, KNOWN_AFTER = 1600, 800
"""Inner steps of a run with usual steps, and of its first part, which is not measured."""
ALONE_STEPS, ALONE_ROUNDS = 100, 40
"""Inner steps of a round of the sites by themselves, and a number of rounds that they never
reach."""
PAIRS = ((0, 1), (0, 2), (2, 3), (1, 3))
"""Hosts that train together, by block. Each trains together as often as by itself."""
PROBE_STEPS = 40
PATIENCE, START_LIMIT = 5.0, 300.0
"""A run is aborted after `PATIENCE` times its expected time plus `START_LIMIT` seconds."""


@dataclass(frozen=True)
class Load:
    """The computation of a step."""

    batch: int = BATCH
    """Sequences per step of a site."""
    width: int = WIDTH
    """Hidden size of the model."""

    def steps(self, usual: int) -> int:
        """Return the number of this load's steps that take about as long as `usual` usual steps."""
        return max(1, usual * BATCH * WIDTH // (self.batch * self.width))

    @property
    def settings(self) -> Settings:
        """Keys of the run file."""
        scale = self.width // WIDTH
        wider = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        model = {**MODEL, **{name: MODEL[name] * scale for name in wider}}
        return {
            "model.architecture": model,
            "site.batch_size": self.batch,
            "site.micro_batch_size": min(BATCH, self.batch),
        }


def speeds(ours: Sequence[Course], others: Sequence[Course], begin: float) -> tuple[float, float]:
    """Return tokens/s of `ours` and of `others`, in the same stretches of time.

    A stretch consists of the whole rounds of one of the others after `begin`, while ours go on. The
    speed of the others is scaled to the number of ours. Raises `LabError` if a site has no whole
    round.
    """
    end = min(course[-1][0] for course in ours)
    mine, theirs = [], []
    for course in others:
        inside = [(moment, tokens) for moment, tokens in course if begin <= moment <= end]
        if len(inside) < 2:
            raise LabError("no whole round without exchange lies in the measured part of the run")
        (first, before), (last, after) = inside[0], inside[-1]
        theirs.append((after - before) / (last - first))
        trained = sum(tokens_at(own, last) - tokens_at(own, first) for own in ours)
        mine.append(trained / (last - first))
    return sum(mine) / len(mine), sum(theirs) / len(theirs) * len(ours)


def made(lab: Lab, folder: Path, load: Load, settings: Settings, steps: int) -> RunConfig:
    """Return the run file of a run at all of the lab's hosts."""
    own = {**settings, **load.settings}
    link = wan_run.slowest(lab)
    return in_lab(lab, wan_run.configuration(folder, len(lab.sites), own, steps, link))


def step_seconds(lab: Lab, folder: Path, load: Load) -> float:
    """Return the seconds of a step while all hosts train by themselves."""
    probe = load.steps(PROBE_STEPS)
    steps = {**NO_EXCHANGE, "outer.inner_steps": probe}
    config = made(lab, folder, load, steps, 2 * probe)
    found = run_alone(lab, config, overwrite=True, warm_up=1).values()
    speed = statistics.fmean(each.tokens_per_second for each in found)
    return load.batch * SEQUENCE_LENGTH / speed


def measure(
    lab: Lab,
    folder: Path,
    load: Load,
    together: Sequence[str],
    work: float | None,
    limit: float,
) -> common.Row:
    """Measure one block: the hosts `together` in one run, each other host by itself.

    Returns the row. Raises `LabError`, also if the block takes more than `limit` seconds.
    """
    settings: Settings = {"outer.method": OURS}
    if work is not None:
        settings["control.work"] = work
    config = made(lab, folder, load, settings, load.steps(STEPS))
    own_steps = load.steps(ALONE_STEPS)
    steps = {**NO_EXCHANGE, "outer.inner_steps": own_steps}
    apart = made(lab, folder, load, steps, own_steps * ALONE_ROUNDS)
    check(config)
    checked = lab.verify()
    others: dict[str, Run] = {}
    try:
        for site in lab.sites:
            if site not in together:
                others[site] = Run(lab, alone(apart, site), overwrite=True)
        ours = Run(lab, of_sites(config, together), overwrite=True)
        finish(lab, [ours], limit=limit)
        for each in others.values():
            each.check()
            each.new_records()
    finally:
        for each in others.values():
            each.end()
    first = wan_run.first_after(ours.records, together, load.steps(KNOWN_AFTER))
    mine = rounds_by_site(ours.records, together)
    begin = max(r["time"] for site in together for r in mine[site] if r["round"] == first - 1)
    theirs = [
        course_of(rounds_by_site(each.records, [site])[site]) for site, each in others.items()
    ]
    result = ours.result(first)
    whole = {site: [r for r in mine[site] if r["round"] <= result.window.last] for site in together}
    own, reference = speeds([course_of(whole[site]) for site in together], theirs, begin)
    return {
        **described(checked, result, together),
        "tokens_per_second": own,
        "no_network_tokens_per_second": reference,
        "share": own / reference,
    }


def synchronous(
    lab: Lab, folder: Path, load: Load, together: Sequence[str], steps: int, limit: float
) -> common.Row:
    """Measure `steps` steps of synchronous training at the hosts `together`, after a first step.

    The other hosts are idle. Returns the row. Raises `LabError`, also after `limit` seconds.
    """
    settings: Settings = {"outer.method": SYNCHRONOUS, "outer.inner_steps": 1}
    config = made(lab, folder, load, settings, 1 + steps)
    check(config)
    checked = lab.verify()
    run = Run(lab, of_sites(config, together), overwrite=True)
    finish(lab, [run], limit=limit)
    return described(checked, run.result(1), together)


def described(checked: Checked, result: RunResult, together: Sequence[str]) -> common.Row:
    """Return the results of a run, and the measured links."""
    link = statistics.fmean(one.bits_per_second for one in checked.links)
    return {
        "method": result.method,
        "sites": len(together),
        "hosts": " ".join(together),
        "link_bits_per_second": round(link),
        "round_trip_ms": round(1000 * checked.round_trip, 2),
        **wan_run.engine_row(result, link),
    }


def speed_up(rows: Sequence[common.Row]) -> str | None:
    """Return a sentence with the speed of the blocks over synchronous training on their link.

    None if synchronous training was not measured.
    """
    slow = [row for row in rows if row["method"] == SYNCHRONOUS]
    if not slow:
        return None
    blocks = blocks_of(rows)
    base = statistics.median(row["tokens_per_second"] for row in slow)
    alone = statistics.median(row["no_network_tokens_per_second"] for row in blocks)
    found = common.median_interval([row["tokens_per_second"] / base for row in blocks])
    return (
        f"allreduce, measured on the same link after them: {base:,.1f} tokens/s, "
        f"{base / alone:.2%} of the speed without a network; dilocox is {found.median:.0f} times "
        f"as fast ({found.low:.0f} to {found.high:.0f})"
    )


def blocks_of(rows: Sequence[common.Row]) -> list[common.Row]:
    """Return the rows that are blocks of `dilocox`."""
    return [row for row in rows if row["method"] == OURS]


def report(every: Sequence[common.Row]) -> str:
    """Return the blocks as a table, followed by their medians."""
    percent = ".1%"
    rows = blocks_of(every)
    table = common.table(
        rows,
        {
            "block": str, "hosts": str, "tokens_per_second": ",.0f",
            "no_network_tokens_per_second": ",.0f", "share": percent, "wait_share": percent,
            "work_share": percent, "inner_steps": ".1f", "plan": str,
        },
    )  # fmt: skip
    found = common.median_interval([row["share"] for row in rows])
    ratios = [row["ratio"] for row in rows]
    trips = [row["round_trip_ms"] for row in rows]
    told = (
        f"{table}\n\nshare of the speed without a network: {found.median:.1%} "
        f"({found.low:.1%} to {found.high:.1%}) in {len(rows)} blocks, on "
        f"{rows[0]['link_bits_per_second'] / 1e3:,.0f} kbit/s, where gradients take "
        f"{min(ratios):.0f} to {max(ratios):.0f} times as long as a step; round trips of "
        f"{min(trips):.1f} to {max(trips):.1f} ms"
    )
    faster = speed_up(every)
    return told if faster is None else f"{told}\n{faster}"


def measured(
    folder: Path,
    load: Load,
    before: Sequence[common.Row],
    blocks: int,
    settings: dict[str, Any],
    allreduce: int,
) -> Iterator[common.Row]:
    """Yield the rows that are missing after the rows `before`.

    First come blocks up to the number `blocks`, then a row of `allreduce` steps of synchronous
    training, if it is requested and missing. Raises `DilocoxError`.
    """
    model = wan_run.configuration(folder, 2, load.settings, 1).model
    parameters = int(count_parameters(load_model_config(model, VOCABULARY)))
    bits = synchronous_bits(parameters, 2)
    known = blocks_of(before)
    with Lab(list(SITES)) as lab:
        if known:
            asked, step = known[0]["link_asked_bits_per_second"], step_of(known, load)
        else:
            common.say("measuring the time of a step")
            step = step_seconds(lab, folder, load)
            asked = link_of(settings["ratio"], parameters, 2, step)
        lab.shape(f"{asked / 1e3:.3f}kbit")
        for block in range(len(known), blocks):
            began = time.monotonic()
            together = [lab.sites[number] for number in PAIRS[block % len(PAIRS)]]
            limit = PATIENCE * load.steps(STEPS) * step + START_LIMIT
            row = measure(lab, folder, load, together, settings["work"], limit)
            known = [*known, row]
            ratio = bits / row["link_bits_per_second"] / step_of([row], load)
            yield {"block": block, **row, **dated(asked, ratio, began)}
        if lacks_synchronous(before, allreduce):
            began = time.monotonic()
            together = [lab.sites[number] for number in PAIRS[0]]
            limit = PATIENCE * (1 + allreduce) * bits / asked + START_LIMIT
            row = synchronous(lab, folder, load, together, allreduce, limit)
            ratio = bits / row["link_bits_per_second"] / step_of(known, load)
            yield {"block": None, **row, **dated(asked, ratio, began)}


def lacks_synchronous(rows: Sequence[common.Row], steps: int) -> bool:
    """Return whether `steps` steps of `allreduce` are requested and not among the rows."""
    return steps > 0 and not any(row["method"] == SYNCHRONOUS for row in rows)


def step_of(blocks: Sequence[common.Row], load: Load) -> float:
    """Return the seconds of a step without a network, from the median speed of `blocks`."""
    speed = float(statistics.median(row["no_network_tokens_per_second"] for row in blocks))
    return 2 * load.batch * SEQUENCE_LENGTH / speed


def dated(asked: float, ratio: float, began: float) -> common.Row:
    """Return fields of a row: requested link, its ratio, date, and duration of the measurement."""
    return {
        "ratio": ratio,
        "link_asked_bits_per_second": asked,
        "commit": common.commit(),
        "date": common.today(),
        "took": round(time.monotonic() - began, 1),
    }


def said(row: common.Row) -> str:
    """Return a row as one line of text."""
    took = f"{row['took']:.0f} s"
    if row["method"] == OURS:
        return f"block {row['block']}: {row['share']:.1%}; {took}"
    return f"{row['method']}: {row['tokens_per_second']:,.1f} tokens/s; {took}"


def main() -> int:
    """Measure, print and write."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--work", type=float, metavar="SHARE", help="control.work of the run")
    parser.add_argument("--ratio", type=int, default=RATIO, choices=RATIOS, help="the link")
    count = common.positive
    parser.add_argument("--blocks", type=count, help=f"{BLOCKS}, or {QUICK_BLOCKS} with --quick")
    parser.add_argument("--batch", type=count, default=BATCH, help="sequences per step and site")
    parser.add_argument(
        "--width", type=int, default=WIDTH, choices=[WIDTH * n for n in (1, 2, 3, 4)],
        help="hidden size of the model",
    )  # fmt: skip
    parser.add_argument(
        "--allreduce", type=count, default=0, metavar="N", help="steps of it, after the blocks"
    )
    options = parser.parse_args()
    load = Load(options.batch, options.width)
    common.end_on_signals()
    blocks = options.blocks or (QUICK_BLOCKS if options.quick else BLOCKS)
    results = options.json or (None if options.quick else RESULTS)
    settings = {
        "work": options.work, "steps": load.steps(STEPS),
        "known_after": load.steps(KNOWN_AFTER), "batch": load.batch, "width": load.width,
        "ratio": options.ratio,
    }  # fmt: skip
    rows = common.read_rows(results, "wan-beside", settings)
    lacking = len(blocks_of(rows)) < blocks or lacks_synchronous(rows, options.allreduce)
    if lacking:
        if common.cannot("wan_beside", unsupported_reason()):
            return common.CANNOT
        on = common.machine()
        if rows:
            common.refuse_other_machine(results, on)
        try:
            with tempfile.TemporaryDirectory(prefix="dilocox-beside-") as folder:
                new = measured(Path(folder), load, list(rows), blocks, settings, options.allreduce)
                for row in new:
                    rows.append(row)
                    common.say(said(row))
                    if results is not None:
                        common.write_json(results, "wan-beside", on, settings, rows)
        except DilocoxError as error:
            common.say(f"wan_beside: {error}")
            return 1
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
