"""Losses by the protocol of benchmarks/evidence/PROTOCOL.md: unseen text, lengths, sizes.

Every row is a real run of `dilocox.train` with its sites as processes of this machine. The text of
`mixed` and `perl` is in the folder of --texts (see `python -m benchmarks.evidence.texts`); the text
of `source` is Python's standard library and the WikiText-2 of --wikitext.

`gap` is the held-out loss over that of synchronous training with the same text, size, length and
seed, less one. `in all` is the bytes of synchronous training over the bytes that were sent. The
verdict is that of two one-sided tests with a margin of 1 %. For lengths and sizes, `per tenfold`
is the slope of the gap over their logarithm, and `change` is its last value less its first.

The protocol ended after its first three cells (DECISION.md); --question asks for the others.

Every row is written when it is done; started again with the same --json, the benchmark goes on,
until its rows have taken 18 hours of both cores. --list shows the results of --json, and needs no
texts. --quick trains three rows of 32 steps, to try the benchmark out, and writes no results.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.evidence import growth, report
from benchmarks.evidence.cells import ALL, DILOCOX, Cell, Group, entries, groups
from benchmarks.evidence.rates import START, best_rate, next_trial, trial_seed
from benchmarks.evidence.run import Run, configuration, train
from benchmarks.evidence.work_texts import WorkTexts, check_options
from benchmarks.quality import tuning
from benchmarks.quality.data import check_wikitext
from benchmarks.quality.rows import LEAD, Settings
from dilocox.errors import DilocoxError

NAME = "evidence"
PROTOCOL = Path(__file__).with_name("PROTOCOL.md")
QUICK_STEPS = 32
DECIDED = 3
"""Cells after which the protocol ends, by DECISION.md."""
BUDGET = 18.0
"""Hours of both cores, by the processor time of all runs. No run begins after them."""


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = common.parser(__doc__ or "")
    made.add_argument("--texts", type=Path, metavar="DIR", help="unseen texts; for all but --list")
    made.add_argument("--wikitext", type=Path, metavar="DIR", help="folder of wikitext2-*.txt")
    made.add_argument("--folder", type=Path, metavar="DIR", help="work there, keep token files")
    made.add_argument(
        "--question", nargs="+", choices=("unseen", "tokens", "ladder"), help="these alone"
    )
    made.add_argument("--only", nargs="+", choices=ALL, metavar="LABEL", help="these methods alone")
    made.add_argument(
        "--cells",
        type=common.positive,
        metavar="N",
        help=f"the first N cells alone (default: {DECIDED}, with --question all; see DECISION.md)",
    )
    made.add_argument("--list", action="store_true", help="show the results so far, train nothing")
    return made


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program if an option is missing, or would have no effect."""
    check_options(parser, options)
    check_wikitext(NAME, options.wikitext)


def main() -> int:
    """Train the missing rows and print the tables. Returns 1 if a row failed or could not begin."""
    parser = arguments()
    options = parser.parse_args()
    common.end_on_signals()
    check(parser, options)
    with tempfile.TemporaryDirectory(prefix="dilocox-evidence-") as temporary:
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
        if options.folder is not None and not options.list:
            common.claim(folder)
        self._settings: dict[str, Any] = {
            "protocol": hashlib.sha256(PROTOCOL.read_bytes()).hexdigest()
        }
        if not options.list:
            self._settings["wikitext"] = options.wikitext is not None
        self._path: Path | None = options.json
        self._rows = common.read_rows(self._path, NAME, self._settings, claimed=not options.list)
        self._committed = tuning.read(common.RESULTS / "quality-tuning.json", LEAD[0])
        self._entries = entries()
        self._texts = WorkTexts(folder, options.texts, options.wikitext)

    @property
    def _groups(self) -> list[Group]:
        asked = self._options.question
        found = [each for each in groups() if asked is None or each.cell.question in asked]
        return found[: self._options.cells or (DECIDED if asked is None else None)]

    def measure(self) -> int:
        """Train all runs that have no row yet. Returns the exit code."""
        on = common.machine()
        failed: set[str] = set()
        while True:
            run = next((each for each in self._missing() if str(each) not in failed), None)
            if run is not None and common.hours_of_both_cores(self._rows) >= BUDGET:
                common.say(f"{BUDGET:g} hours of both cores are used; {run} and later: not done")
                return 1
            if run is None:
                return 1 if failed or self._name_waiting() else 0
            steps = QUICK_STEPS if self._options.quick else None
            cell = run.cell
            counts = [] if cell.same_text else [cell.sites]
            text = self._texts.tokenised(cell.source, run.seed, counts)
            config = configuration(run, text, self._folder / "run", steps)
            digest = self._texts.digest(cell.source, run.seed)
            key = {"source": cell.source, "seed": run.seed}
            common.refuse_other_text(self._path, self._rows, digest, key)
            if not self._options.quick:
                self._refuse_other_settings(run, config.total_steps)
            try:
                row = train(run, config, self._folder / "run.log")
            except DilocoxError as error:
                common.say(f"{run}: {error}")
                failed.add(str(run))
                continue
            if row is None:
                common.say("stopped; started again, the benchmark goes on with this row")
                return 130
            self._rows.append({**row, "text": digest, "date": common.today()})
            self._write(on)
            reached = "diverged" if row["failed"] else f"loss {row['val_loss']:.4f}"
            common.say(f"{run}: {reached}, {row['seconds']:.0f} s")

    def _refuse_other_settings(self, run: Run, steps: int) -> None:
        """End the program if rows of the run's cell have other steps, or outer rates, than it."""
        rows = [row for row in self._rows if report.is_of(row, run.cell, row["label"])]
        for row in rows:
            if row.get("steps", steps) != steps:
                raise SystemExit(
                    f"{self._path}: {run.cell}: has rows of {row['steps']} steps, and this call "
                    f"would train {steps}; name another file by --json"
                )
            had = [row.get(f"outer_{name}") for name in ("learning_rate", "momentum")]
            own = [run.outer.get(f"outer.{name}") for name in ("learning_rate", "momentum")]
            if row["label"] == run.entry.label and None not in (*had, *own) and had != own:
                raise SystemExit(
                    f"{self._path}: {row['label']}, {run.cell}: has rows with the outer rates "
                    f"{had[0]:g}/{had[1]:g}, and this call has {own[0]:g}/{own[1]:g}; restore "
                    "results/quality-tuning.json, or name another file by --json"
                )

    def show(self) -> None:
        """Print the table of every cell that has rows, and the machine time in all."""
        for group in self._groups:
            known = self._results(group)
            if known:
                lines = report.mixed_commits(self._rows, group)
                print("\n".join([f"\n{group.cell}", report.table(known), *lines]))
        self._show_growth()
        used = common.hours_of_both_cores(self._rows)
        print(f"\n{len(self._rows)} runs, {used:.1f} of {BUDGET:g} hours of both cores")

    def _show_growth(self) -> None:
        """Print for lengths and sizes whether the gap grows, if two of them can be compared."""
        known = [result for group in groups() for result in self._results(group)]
        parameters = {row["size"]: row["parameters"] for row in self._rows}
        for question, axis in growth.AXES.items():
            asked = self._options.question
            found = growth.growths(known, question, parameters)
            if found and (asked is None or question in asked):
                print(f"\nDoes the gap grow with {axis}?\n{growth.table(found)}")

    def _results(self, group: Group) -> list[report.Result]:
        """Return the results of the methods of a group that have rows."""
        starts = {label: self._start(group.cell, label) for label in group.labels}
        return [each for each in report.results(self._rows, group, starts) if each.losses]

    def _asked(self) -> Iterator[tuple[Group, str]]:
        """Yield the methods and cells that the options ask for."""
        asked = self._options.only
        for group in self._groups[:1] if self._options.quick else self._groups:
            for label in group.labels:
                if asked is not None and label not in asked:
                    continue
                if self._options.quick and label not in (ALL[0], *DILOCOX):
                    continue
                yield group, label

    def _missing(self) -> Iterator[Run]:
        """Yield the next run of each method and cell that is not complete."""
        for group, label in self._asked():
            run = None if self._waits(group.cell, label) else self._next(group, label)
            if run is not None:
                yield run

    def _waits(self, cell: Cell, label: str) -> bool:
        """Return whether trials that decide the first rate of a method in a cell are missing."""
        if cell.starts_at is None:
            return False
        before = next(group for group in groups() if group.cell == cell.starts_at)
        done = report.trials_of(
            self._rows, before.cell, label, trial_seed(before.cell, before.seeds)
        )
        start = self._start(before.cell, label)
        open_trial = next_trial(before.cell, label, start, done) is not None
        return open_trial or self._waits(before.cell, label)

    def _name_waiting(self) -> bool:
        """Print how many methods wait for trials of an earlier cell. Returns whether any waits."""
        waiting = [
            (group, label) for group, label in self._asked() if self._waits(group.cell, label)
        ]
        if waiting:
            (group, label), count = waiting[0], len(waiting)
            common.say(
                f"{count} methods wait for trials of earlier cells, first {label} in {group.cell}; "
                "call again, without --question and --cells"
            )
        return bool(waiting)

    def _next(self, group: Group, label: str) -> Run | None:
        """Return the next trial or row of a method in a cell. None if all are there."""
        cell, start = group.cell, self._start(group.cell, label)
        seed = trial_seed(cell, group.seeds)
        done = report.trials_of(self._rows, cell, label, seed)
        rate = None if self._options.quick else next_trial(cell, label, start, done)
        if rate is not None:
            return self._run(cell, label, seed, rate)
        rate = best_rate(start, done)
        seeds = group.seeds[:1] if self._options.quick else group.seeds
        for seed in seeds:
            if rate not in report.trials_of(self._rows, cell, label, seed):
                return self._run(cell, label, seed, rate)
        return None

    def _run(self, cell: Cell, label: str, seed: int, rate: float) -> Run:
        return Run(cell, self._entries[label], seed, rate, self._outer(label))

    def _chosen(self, label: str) -> tuning.Rates:
        entry = self._entries[label]
        return tuning.chosen(entry, self._committed.get(entry.tuned_as, {}))

    def _outer(self, label: str) -> Settings:
        """Return the outer rates of results/quality-tuning.json, for methods that have any."""
        settings = self._chosen(label).settings
        return {key: value for key, value in settings.items() if key.startswith("outer.")}

    def _start(self, cell: Cell, label: str) -> float:
        """Return the first rate of a method's trials in a cell."""
        if cell.rule == "frozen":
            return self._chosen(label).inner
        if cell.starts_at is None:
            return START
        before = next(group for group in groups() if group.cell == cell.starts_at)
        seed = trial_seed(before.cell, before.seeds)
        done = report.trials_of(self._rows, before.cell, label, seed)
        return best_rate(self._start(before.cell, label), done)

    def _write(self, on: dict[str, Any]) -> None:
        if self._path is not None:
            common.write_json(self._path, NAME, on, self._settings, self._rows)


if __name__ == "__main__":
    sys.exit(main())
