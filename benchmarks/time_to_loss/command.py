"""Measures the time to the loss of synchronous training, on a slow link (PROTOCOL.md).

Two sites are hosts of a lab (`dilocox.tools.testbed`). First synchronous training runs without a
limit on the links: its held-out loss at the end is the loss to reach. Then dilocox runs on a link
that fp32 gradients need 400 times a step to cross. `over_synchronous` is the time of dilocox until
it has the loss, over that of synchronous training. `over_computing` leaves the waiting of
synchronous training out. Lines with `at least` are bounds that favour the method: steps until the
loss, and payload bytes at the full rate of the link.

The text is in the folder of --texts (see `python -m benchmarks.evidence.texts`). Every row is
written when it is done; started again with the same --json, the benchmark goes on. All rows take
about six hours on two cores. --plain makes the runs whose time does not count, also without root
and beside other work. --second makes the runs of SECOND.md, in which dilocox is told what messages
take; a new file begins with the trials of the first protocol. --list shows the results so far.
--quick makes two timed runs of 24 steps, to try the benchmark out, and writes no results.

Timed runs need Linux, root, iproute2 and control groups; without them the benchmark prints one line
and exits with code 3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks import common
from benchmarks.evidence.rates import best_rate
from benchmarks.evidence.work_texts import WorkTexts, check_options
from benchmarks.quality import tuning
from benchmarks.quality.data import Text
from benchmarks.quality.rows import LEAD
from benchmarks.time_to_loss import cases, report
from benchmarks.time_to_loss.cases import (
    BASELINE,
    OURS,
    RATIO,
    SECOND_SEEDS,
    SEEDS,
    SITES,
    TOLD,
    Case,
    Row,
    Source,
)
from benchmarks.time_to_loss.run import configuration, train_in_lab, train_plain
from benchmarks.wan.grid import link_of
from dilocox.errors import DilocoxError
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.testbed import unsupported_reason

NAME = "time_to_loss"
PROTOCOL = Path(__file__).with_name("PROTOCOL.md")
SECOND = Path(__file__).with_name("SECOND.md")
FIRST_ROWS = common.RESULTS / "time_to_loss-cpu.json"
"""Rows of the first protocol, whose trials the second one has as well."""
TRIALS = "plain", BASELINE
"""Kind and label of the trials of synchronous training."""
QUICK_STEPS = 24
STEP_LIMIT, START_LIMIT = 30.0, 300.0
"""A timed run is given up after `START_LIMIT` seconds and `STEP_LIMIT` seconds per step."""


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = common.parser(__doc__ or "")
    made.add_argument("--texts", type=Path, metavar="DIR", help="unseen texts; for all but --list")
    made.add_argument("--folder", type=Path, metavar="DIR", help="work there, keep token files")
    made.add_argument("--text", nargs="+", choices=get_args(Source), help="these texts alone")
    made.add_argument("--plain", action="store_true", help="only runs whose time does not count")
    made.add_argument("--second", action="store_true", help="the timed runs of SECOND.md instead")
    made.add_argument("--list", action="store_true", help="show the results so far, train nothing")
    return made


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program if an option is missing, or would have no effect."""
    check_options(parser, options)
    if options.quick and options.plain:
        parser.error("--quick: makes timed runs alone; leave out --plain")
    if options.second and options.plain:
        parser.error("--second: has timed runs alone; leave out --plain")


def main() -> int:
    """Make the missing runs and print the tables. Returns 1 if a run failed."""
    parser = arguments()
    options = parser.parse_args()
    common.end_on_signals()
    check(parser, options)
    timed = not (options.plain or options.list)
    if timed and common.cannot(NAME, unsupported_reason()):
        return common.CANNOT
    with tempfile.TemporaryDirectory(prefix="dilocox-time-to-loss-") as temporary:
        bench = Bench(options, (options.folder or Path(temporary)).resolve())
        try:
            code = 0 if options.list else bench.measure()
        except DilocoxError as error:
            common.say(f"{NAME}: {error}")
            code = 1
    bench.show()
    return code


class Bench:
    """One call of the benchmark: its texts, its folder and the file of its rows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._settings = {
            "protocol": hashlib.sha256(PROTOCOL.read_bytes()).hexdigest(),
            "ratio": RATIO,
        }
        if options.second:
            self._settings["second"] = hashlib.sha256(SECOND.read_bytes()).hexdigest()
        if options.folder is not None and not options.list:
            common.claim(folder)
        self._path: Path | None = options.json
        self._rows: list[Row] = common.read_rows(
            self._path, NAME, self._settings, claimed=not options.list
        )
        if options.second and not self._rows:
            first = json.loads(FIRST_ROWS.read_text(encoding="utf-8"))["rows"]
            self._rows = [row for row in first if (row["kind"], row["label"]) == TRIALS]
        committed = tuning.read(common.RESULTS / "quality-tuning.json", LEAD[0])
        self._entries = cases.entries()
        self._rates = {
            label: tuning.chosen(entry, committed.get(entry.tuned_as, {}))
            for label, entry in self._entries.items()
        }
        self._texts = WorkTexts(folder, options.texts)

    def measure(self) -> int:
        """Make all runs that have no row yet. Returns the exit code."""
        on = self._machine()
        failed: set[str] = set()
        while True:
            case = next((each for each in self._missing() if str(each) not in failed), None)
            if case is None:
                return 1 if failed else 0
            text = self._texts.tokenised(case.source, case.seed, [len(SITES)])
            digest = self._texts.digest(case.source, case.seed)
            key = {"source": case.source, "seed": case.seed}
            common.refuse_other_text(self._path, self._rows, digest, key)
            common.say(f"{case}: begins")
            try:
                row = self._train(case, text)
            except DilocoxError as error:
                common.say(f"{case}: {error}")
                failed.add(str(case))
                continue
            if row is None:
                common.say("stopped; started again, the benchmark goes on with this run")
                return 130
            self._rows.append({**row, "text": digest})
            self._write(on)
            reached = "diverged" if row["failed"] else f"loss {row['val_loss']:.4f}"
            common.say(f"{case}: {reached}, {row['seconds'] or 0:.0f} s")

    def show(self) -> None:
        """Print the table of every text that has timed runs, and the machine time in all."""
        for source in self._sources:
            known = report.lines(self._rows, source)
            if known:
                print(f"\n{source}\n{report.table(known)}")
                print(report.verdict(known, source) or "")
            for line in known:
                if line["plan"]:
                    print(f"- {line['method']}, seed {line['seed']}: {line['plan']}")
        used = common.hours_of_both_cores(self._rows)
        print(f"\n{len(self._rows)} runs, {used:.1f} hours of both cores")

    @property
    def _sources(self) -> Sequence[Source]:
        asked: Sequence[Source] = self._options.text or get_args(Source)
        return asked[:1] if self._options.quick else asked

    def _missing(self) -> Iterator[Case]:
        """Yield the runs that can be made next, the most wanted one first.

        A trial that failed is made again in the next call. Until then its text has no other runs,
        since the rate of synchronous training is not known.
        """
        quick = self._options.quick
        for source in self._sources:
            trial = None if quick else cases.trial(self._rows, source, self._rates)
            if trial is not None:
                yield trial
                continue
            done = cases.tried(self._rows, source)
            rate, ours = best_rate(self._rates[BASELINE].inner, done), self._rates[OURS].inner
            seeds, label = (SECOND_SEEDS, TOLD) if self._options.second else (SEEDS, OURS)
            for seed in seeds[source][: 1 if quick else None]:
                if not self._options.plain:
                    case = cases.timed(self._rows, source, seed, rate, ours, label)
                    if case is not None and not (quick and case.length > 1):
                        yield case
            # Last, because timed runs want one quiet machine, and these do not.
            if source == "perl" and not quick and not self._options.second:
                yield from cases.rivals(self._rows, source, self._rates, min(done.values()))

    def _train(self, case: Case, text: Text) -> Row | None:
        """Make a run and return its row; None if an interrupt stopped it. Raises `DilocoxError`."""
        link, step = self._link(case) if case.kind == "link" else ("none", math.inf)
        config = configuration(
            case, self._entries[case.label], self._rates[case.label],
            cases.declared(case, link, step), text, self._folder,
            QUICK_STEPS if self._options.quick else None,
        )  # fmt: skip
        if case.kind == "plain":
            return train_plain(case, config, self._folder / "run.log")
        with Lab(list(SITES), link) as lab:
            return train_in_lab(case, config, lab, START_LIMIT + STEP_LIMIT * config.total_steps)

    def _link(self, case: Case) -> tuple[str, float]:
        """Return the link of a text and seed, and the seconds of a step for which it is made."""
        known = next(
            row
            for row in self._rows
            if (row["kind"], row["source"], row["seed"]) == ("reference", case.source, case.seed)
        )
        reference = report.reference_of(known)
        step = reference.computing / reference.steps
        rate = link_of(RATIO, known["parameters"], len(SITES), step)
        return f"{rate / 1e3:.3f}kbit", round(step, 4)

    def _machine(self) -> dict[str, Any]:
        """Return the machine of the file: that of its timed runs, or else this one.

        Ends the program if timed runs of another machine are there and more are asked for.
        """
        on = common.machine()
        if self._path is None or all(row["kind"] == "plain" for row in self._rows):
            return on
        if not self._options.plain:
            common.refuse_other_machine(self._path, on)
        found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))["machine"]
        return found

    def _write(self, on: dict[str, Any]) -> None:
        if self._path is not None:
            common.write_json(self._path, NAME, on, self._settings, self._rows)
