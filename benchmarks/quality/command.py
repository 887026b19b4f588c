"""Held-out loss of every method against the bytes it sends, side by side in one engine.

Every row is a real run of `dilocox.train` with its sites as processes of this machine, one rank
each with one thread. All rows have the same text, tokens, model, batch and seeds (a qwen3 of 0.67M
parameters over bytes, 128 tokens per sequence, 32 sequences per step). The text is Python's
standard library and, with --wikitext, parts of WikiText-2. Non-IID means that each site trains on a
contiguous part of it. A seed decides initial weights, order of the text and the held-out text.

The held-out loss is that of the anchor on 1,024 sequences spread over all of the text. Its standard
error is 0.35 to 0.55 % of the loss, and at most 0.25 % for the difference of two rows of a seed,
which use the same sequences. `gap` is the loss over that of synchronous training (`allreduce`) with
the same inner optimizer, text and seed, less one. Reductions count the payload bytes that sites
sent. The one per transfer is against fp32 vectors exchanged in the same way. The one in all is
against the bytes of synchronous training, and includes the flush at the end of training.

Regimes: `paper`, 640 steps, 32 rounds of the paper's method; `long`, 3,300 steps, 20 tokens per
parameter. Rounds of published methods are scaled to these runs (rows have H and the published H).
The links of dilocox's rows are declared, one per target reduction R: on 90 % of the link,
synchronous training would need R times the declared step time.

Learning rates are tuned by the same rule for every method, in short and in long runs: --tune makes
the trials, and results/quality-tuning.json holds them. The row called "published" has the published
outer learning rate and momentum, with the best inner learning rate for them.

A full run (no options) takes hours. Every row is written when it is done. Started again, the
benchmark continues with the missing rows. --quick trains seven rows of the first regime, 320 steps
each. It should end within 12 minutes on two idle cores. It took 9.7 minutes, and 13.5 on slower
cores.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.quality import data as quality_data
from benchmarks.quality import docs as quality_docs
from benchmarks.quality import grid as quality_grid
from benchmarks.quality import plot as quality_plot
from benchmarks.quality import report as quality_report
from benchmarks.quality import rows as quality_rows
from benchmarks.quality import tuning as quality_tuning
from benchmarks.quality.data import Text
from benchmarks.quality.jobs import SEEDS, Job, select
from benchmarks.quality.rows import LEAD, LONG, REGIMES
from benchmarks.quality.run import Row, configuration, parameters, train
from dilocox.coordinator.controller import loss_model
from dilocox.data import TokenFiles
from dilocox.errors import DilocoxError

NAME = "quality"
LOSS_TABLE = Path(loss_model.__file__).with_name("loss_table.json")
QUICK_STEPS = 320


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = common.parser(__doc__ or "")
    made.add_argument("--wikitext", type=Path, metavar="DIR", help="folder of wikitext2-*.txt")
    made.add_argument("--folder", type=Path, metavar="DIR", help="work there, keep token files")
    made.add_argument("--keep", action="store_true", help="keep run folders (with --folder)")
    made.add_argument("--tune", action="store_true", help="make the tuning trials instead")
    made.add_argument(
        "--tuning", type=Path, metavar="FILE", default=common.RESULTS / "quality-tuning.json"
    )
    made.add_argument(
        "--only", nargs="+", metavar="NAME", help="labels, methods, `core`, `muon`, `ablations`"
    )
    made.add_argument("--regime", nargs="+", choices=list(REGIMES), default=list(REGIMES))
    made.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    made.add_argument("--sites", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    made.add_argument("--iid", choices=("no", "yes", "both"), default="both")
    made.add_argument("--docs", action="store_true", help="write the tables of docs/methods.md")
    made.add_argument(
        "--loss-table",
        action="store_true",
        help="train the grid that the controller's loss table is made from, and write it",
    )
    made.add_argument(
        "--steps", type=common.positive, help="shorter runs, to try the benchmark itself out"
    )
    made.add_argument(
        "--try",
        dest="tried",
        nargs="+",
        default=[],
        metavar="SETTINGS",
        help='only these entries, as in "method=dilocox outer.inner_steps=5 inner.clip=0.5"',
    )
    return made


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program if options contradict each other, or if one of them cannot be read."""
    if options.loss_table and (options.quick or options.steps):
        parser.error(
            "--loss-table: its runs are as long as those of the table; leave out --quick, --steps"
        )
    if options.loss_table and (options.only or options.tried or options.tune):
        parser.error("--loss-table: trains its whole grid; leave out --only, --try, --tune")
    if options.docs and (options.quick or options.steps or options.tried or options.loss_table):
        parser.error(
            "--docs: writes the tables of the full benchmark; leave out --quick, --steps, --try, "
            "--loss-table"
        )
    if options.tune and (options.steps or options.quick):
        parser.error("--tune: trials have steps of their own; leave out --steps, --quick")
    if options.tune and (options.json or options.tried or options.docs):
        parser.error(
            "--tune: writes its trials to the file of --tuning; leave out --json, --try, --docs"
        )
    if options.keep and options.folder is None:
        parser.error("--keep: run folders are kept below --folder; name it")
    try:
        for text in options.tried:
            quality_rows.tried_entry(text)
    except ValueError as error:
        parser.error(f"--try: {error}")


def main() -> int:
    """Train the missing rows, print and write the results. Returns 1 if a row failed."""
    parser = arguments()
    options = parser.parse_args()
    common.end_on_signals()
    check(parser, options)
    trying = bool(options.steps or options.tried)
    if options.steps is None and options.quick:
        options.steps = QUICK_STEPS
    if options.json is None and not options.quick and not trying:
        name = "quality-grid-cpu.json" if options.loss_table else "quality-cpu.json"
        options.json = common.RESULTS / name
    if options.docs:
        return write_docs(options.json, common.ROOT / "docs" / "methods.md")
    with tempfile.TemporaryDirectory(prefix="dilocox-quality-") as temporary:
        try:
            bench = Bench(options, (options.folder or Path(temporary)).resolve())
            code = bench.tune() if options.tune else bench.measure()
        except DilocoxError as error:
            common.say(f"quality: {error}")
            return 1
    if options.loss_table and code == 0:
        try:
            write_loss_table(options.json, options.seeds[0])
        except ValueError as error:
            common.say(f"quality: no loss table was written: {error}")
            return 1
    return code


def write_loss_table(results: Path, seed: int) -> None:
    """Write the controller's loss table anew, from the rows of the grid of one seed.

    Raises the errors of `benchmarks.quality.grid.measured_table`.
    """
    known = common.read_results(results, NAME)["rows"]
    rows = [row for row in known if row["label"].startswith("grid ") and row["seed"] == seed]
    steps = sorted({row["steps"] for row in rows})
    about = (
        f"{quality_grid.ABOUT} Runs of {', '.join(map(str, steps))} steps, seed "
        f"{seed}, benchmarks/results/{results.name}."
    )
    made = quality_grid.measured_table(rows, loss_model.committed(), about)
    LOSS_TABLE.write_text(quality_grid.as_text(made), encoding="utf-8")


def write_docs(results: Path, document: Path) -> int:
    """Write the tables of a results file into a document. Returns the exit code.

    Ends the program if the file holds no results, since the tables would be emptied. Raises
    `OSError` if the document does not exist.
    """
    rows = common.read_results(results, NAME)["rows"]
    known = quality_report.points(quality_report.with_gaps(rows))
    text = document.read_text(encoding="utf-8")
    document.write_text(quality_docs.filled(text, known), encoding="utf-8")
    return 0


class Bench:
    """One call of the benchmark: its text, its folder and the file of its rows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        if options.folder is not None:
            common.claim(folder)
        self._on = common.machine()
        self._text = Text.write(folder / "text", _wikitext(options.wikitext))
        self._tokenised: dict[tuple[int, int], bool] = {}
        self._seconds: dict[str, list[float]] = {}
        self._failures = 0

    def measure(self) -> int:
        """Train all jobs that have no row yet, then write table, plot and verdicts.

        Trials and shorter runs are written only to the file of --json, never to the results.
        """
        path = self._options.json
        rows = common.read_rows(path, NAME, self._constants)
        tuning = self._options.tuning
        known = [quality_tuning.read(tuning, regime) for regime in (LEAD[0], LONG)]
        jobs = list(select(self._options, *known))
        if not jobs:
            common.say("quality: these options leave nothing to train")
            return 2
        self._refuse_other_lengths(rows, jobs)
        _name_untuned(jobs, known[0], tuning)
        for earlier in rows:
            self._learn(earlier)
        missing = [job for job in jobs if not any(self._is_of(row, job) for row in rows)]
        for number, job in enumerate(missing):
            self._refuse_other_text(path, rows, job)
            row = self._train(job, missing[number:])
            if row is None:
                continue
            rows = [other for other in rows if not _same(other, job)] + [row]
            rows = quality_report.with_gaps(rows)
            self._write(path, rows)
        rows = quality_report.with_gaps(rows)
        self._show([row for row in rows if any(self._is_of(row, job) for job in jobs)])
        if path is not None and missing:
            _draw(path.with_suffix(".svg"), rows)
        return 1 if self._failures else 0

    def tune(self) -> int:
        """Make the missing tuning trials, first of short runs, then of long runs."""
        path = self._options.tuning
        rows = common.read_rows(path, NAME, self._constants)
        entries = quality_rows.tuning_entries()
        names = self._options.only or list(entries)
        if unknown := set(names) - set(entries):
            common.say(f"quality: --only {min(unknown)!r}: tuned are {', '.join(entries)}")
            return 2
        for regime in (name for name in REGIMES if name in self._options.regime):
            self._options.steps = quality_tuning.TRIAL_STEPS if regime == LEAD[0] else None
            for tuned_as in names:
                if regime == LONG and entries[tuned_as].group == "muon":
                    continue
                if not self._try_rates(regime, tuned_as, entries[tuned_as], rows):
                    return 1
        print(common.table(rows, dict.fromkeys(rows[-1], str) if rows else {}))
        return 0

    def _try_rates(
        self, regime: str, tuned_as: str, entry: quality_rows.Entry, rows: list[Row]
    ) -> bool:
        """Make the missing trials of one method, add them to `rows`, and return whether all exist.

        Trials on another text cannot be compared, so they end the program.
        """
        seed = quality_tuning.SEED if regime == LEAD[0] else quality_tuning.LONG_SEED
        while (trial := _open_trial(regime, tuned_as, entry, rows)) is not None:
            job = Job(entry, regime, *LEAD[1:], seed, trial.settings)
            self._refuse_other_text(self._options.tuning, rows, job)
            row = self._train(job, [job])
            if row is None:
                return False
            rows.append(quality_tuning.row(tuned_as, trial, row))
            self._write(self._options.tuning, rows)
        return True

    def _train(self, job: Job, to_come: Sequence[Job]) -> Row | None:
        """Train a job, print a line, and return its row. None if it failed without diverging."""
        self._tokenise(job)
        run = self._folder / "run"
        log = self._folder / "run.log"
        try:
            config = configuration(job, self._text, run, self._options.steps)
            row = train(job, config, log, keep=self._options.keep)
        except DilocoxError as error:
            common.say(f"{job}: {error}")
            self._failures += 1
            return None
        if row is None:
            common.say("stopped; started again, the benchmark goes on with this row")
            sys.exit(130)
        row["text"] = self._described(job.seed)["digest"]
        row["date"] = common.today()
        self._learn(row)
        reached = "diverged" if row["failed"] else f"loss {row['val_loss']:.4f}"
        less = f"{row['reduction_total']:,.0f}x" if row["reduction_total"] else "-"
        common.say(
            f"{job}: {reached}, {less} in all, {row['seconds']:.0f} s; "
            f"{len(to_come) - 1} rows to come, {self._remaining(to_come[1:])}"
        )
        if self._options.keep:
            run.rename(self._folder / f"run-{time.time_ns()}")
        return row

    def _refuse_other_text(self, path: Path | None, rows: Sequence[Row], job: Job) -> None:
        """End the program if rows of the job's seed are of another text than the job's."""
        self._tokenise(job)
        text = self._described(job.seed)["digest"]
        common.refuse_other_text(path, rows, text, {"seed": job.seed})

    def _refuse_other_lengths(self, rows: Sequence[Row], jobs: Sequence[Job]) -> None:
        """End the program if rows of a job's regime have another number of steps."""
        for job in jobs:
            wanted = self._steps(job)
            found = {row["steps"] for row in rows if row["regime"] == job.regime} - {wanted}
            if found:
                sys.exit(
                    f"{self._options.json}: holds rows of {min(found)} steps, these options ask "
                    f"for {wanted}; name another file by --json"
                )

    def _steps(self, job: Job) -> int:
        return int(self._options.steps or REGIMES[job.regime].steps)

    def _tokenise(self, job: Job) -> None:
        counts = [] if job.iid else [job.sites]
        if not all(self._tokenised.get((job.seed, count)) for count in counts or [0]):
            self._text.tokenise(job.seed, counts)
            self._tokenised |= {(job.seed, count): True for count in [*counts, 0]}

    def _learn(self, row: Row) -> None:
        self._seconds.setdefault(row["method"], []).append(row["seconds"] / row["steps"])

    def _remaining(self, jobs: Sequence[Job]) -> str:
        """Return the expected time of `jobs`, from the step times of the same or any method."""
        known = [value for values in self._seconds.values() for value in values]
        total = 0.0
        for job in jobs:
            values = self._seconds.get(job.entry.method, known)
            total += self._steps(job) * sum(values) / len(values)
        hours, minutes = divmod(round(total / 60), 60)
        return f"about {hours}:{minutes:02d} h"

    def _is_of(self, row: Row, job: Job) -> bool:
        """Return whether `row` is the result of `job`, with the same settings and steps."""
        same = row["settings"] == job.settings_text and row["steps"] == self._steps(job)
        return same and _same(row, job)

    def _write(self, path: Path | None, rows: Sequence[Row]) -> None:
        """Write the rows, with a description of the text of each seed."""
        if path is None:
            return
        # Rows of seeds that are not trained now keep the description of their text.
        texts = _read_text(path)
        for seed, sites in sorted(self._tokenised):
            if sites == 0:
                texts[str(seed)] = self._described(seed)
        common.write_json(path, NAME, self._on, {**self._constants, "text": texts}, rows)

    def _described(self, seed: int) -> dict[str, Any]:
        """Return a description of the text of `seed`. Its digest covers the order of training."""
        return quality_data.describe(TokenFiles.open(self._text.mixture(seed)))

    @functools.cached_property
    def _constants(self) -> dict[str, Any]:
        """Settings of all rows that no option changes."""
        sample = Job(quality_rows.core_entries()[0], *LEAD, 0, {})
        return {
            "model": dict(quality_rows.MODEL),
            "parameters": parameters(configuration(sample, self._text, self._folder / "run")),
            "batch": quality_rows.BATCH,
            "sequence_length": quality_data.SEQUENCE_LENGTH,
            "steps": {name: regime.steps for name, regime in REGIMES.items()},
            "warmup_steps": {name: regime.warmup_steps for name, regime in REGIMES.items()},
            "step_seconds": quality_rows.STEP_SECONDS,
            "utilisation": quality_rows.UTILISATION,
        }

    def _show(self, rows: Sequence[Row]) -> None:
        known = quality_report.points(rows)
        for where in quality_report.cells(known):
            inside = [point for point in known if point.cell == where]
            print(f"\n{quality_report.title(where)}")
            print(quality_report.table(inside))
            for line in quality_report.verdicts(inside):
                print(f"- {line}")


def _open_trial(
    regime: str, tuned_as: str, entry: quality_rows.Entry, rows: Sequence[Row]
) -> quality_tuning.Rates | None:
    """Return the next tuning trial. None if all trials are made."""
    done = quality_tuning.from_rows(rows, regime).get(tuned_as, {})
    if regime == LEAD[0]:
        trials = quality_tuning.open_trials(tuned_as, done)
    else:
        short = quality_tuning.from_rows(rows).get(tuned_as)
        if not short:
            sys.exit(f"quality: {tuned_as}: make the trials of short runs first (--regime paper)")
        trials = quality_tuning.open_long_trials(quality_tuning.chosen(entry, short), done)
    return trials[0] if trials else None


def _draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw the picture of all existing rows, whichever rows this call requested."""
    known = quality_report.points(rows)
    if any(point.group == "core" for point in known):
        path.write_text(quality_plot.picture(known), encoding="utf-8")


def _wikitext(given: Path | None) -> Path | None:
    """Return the folder `given`, or the one beside the checkout. None if it has no WikiText.

    Ends the program if the folder `given` has no WikiText.
    """
    quality_data.check_wikitext(NAME, given)
    folder = given or common.ROOT.parent / "shared" / "data"
    if any(folder.glob(quality_data.WIKITEXT)):
        return folder
    common.say("quality: no WikiText-2 at hand, the standard library alone")
    return None


def _name_untuned(jobs: Sequence[Job], trials: quality_tuning.Trials, path: Path) -> None:
    """Print which methods have no trials: they train at a rate that was not tuned."""
    bare = [job.entry for job in jobs if "inner.learning_rate" not in job.entry.settings]
    for name in sorted({entry.tuned_as for entry in bare if not trials.get(entry.tuned_as)}):
        common.say(
            f"quality: {path} has no trials of {name}; the inner rate is "
            f"{quality_tuning.UNTUNED_RATE:g}"
        )


def _read_text(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return dict(common.read_results(path, NAME).get("settings", {}).get("text", {}))


def _same(row: Row, job: Job) -> bool:
    return all(row[key] == value for key, value in job.key.items())
