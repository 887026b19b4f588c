"""Loss, bytes and a task of fine-tuning by every method, with adapters and with all parameters.

The model is SmolLM2-135M-Instruct (`python scripts/get_smollm2.py FOLDER` makes its folder).
Conversations come from Python's standard library; the answer is the docstring of a function. With
--wikitext more conversations come from WikiText-2; the answer is the second half of a paragraph.
Each site trains on a contiguous part of its own. Every row is a real run of `dilocox.train` with
its sites as processes of this machine: 64 inner steps of 8 sequences of 256 tokens.

The held-out loss counts the tokens of answers. `gap` is the loss over that of synchronous training
of the same mode, sites and seed, less one. `reduction` is against the bytes of synchronous training
of the same parameters, `of_full` against synchronous training of all parameters. `accuracy` is the
share of held-out functions for which the model finds the docstring among four.

Every entry has the same three inner learning rates as trials, in runs of half the length, with two
sites and a seed of its own. The best rate is used. `--tune` makes the trials; without it, entries
with trials are trained for the seeds of --seeds. Links of `dilocox` are declared, one per
reduction. The peer's rules are Nesterov momentum 0.9 and no momentum (`diloco`). --study changes
one thing of a plan at a time, with two sites: local steps, codec, outer rates, frozen A
(`study.py`).

Every row is written when it is done; started again with the same --json, the benchmark continues.
A full run takes hours. --quick trains three rows with adapters and two sites, 16 steps each, at the
middle learning rate. The computation is in bf16 where the processor multiplies bf16, and else in
fp32 (--precision). A row is compared with a synchronous row of the same precision. Trials of the
other precision serve where those of the same one are missing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.finetune import report, rows, study
from benchmarks.finetune.data import Conversations
from benchmarks.finetune.rows import ADAPTER, BATCH, RATES, SEEDS, Job, Precision
from benchmarks.finetune.run import Row, configuration, train
from benchmarks.quality.data import check_wikitext
from dilocox.data import TokenFiles
from dilocox.errors import DilocoxError
from dilocox.inner.device import cpu_multiplies_bf16
from dilocox.training.model_plan import ModelPlan

NAME = "finetune"
QUICK_STEPS = 16
QUICK = (rows.BASELINE, f"dilocox {rows.TARGETS['lora'][-1]}x", "diloco, Nesterov .9")


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = common.parser(__doc__ or "")
    made.add_argument("--model", type=Path, required=True, metavar="DIR", help="SmolLM2's folder")
    made.add_argument("--wikitext", type=Path, metavar="DIR", help="folder of wikitext2-*.txt")
    made.add_argument("--folder", type=Path, metavar="DIR", help="work there, keep token files")
    made.add_argument("--tune", action="store_true", help="make the trials instead")
    made.add_argument("--study", action="store_true", help="make the runs of study.py instead")
    made.add_argument("--modes", nargs="+", choices=list(RATES), default=list(RATES))
    made.add_argument("--sites", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    made.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    made.add_argument(
        "--precision", choices=("bf16", "fp32"),
        help="of the computation (default: bf16 if the processor multiplies bf16, else fp32)",
    )  # fmt: skip
    made.add_argument("--only", nargs="+", metavar="LABEL", help="entries with these labels alone")
    return made


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program if options contradict each other, or name nothing."""
    if options.quick + options.tune + options.study > 1:
        parser.error("--quick, --tune and --study: give one of them")
    labels = [entry.label for mode in options.modes for entry in rows.entries(mode)]
    if options.study or options.quick:
        labels = list(study.LABELS if options.study else QUICK)
    for name in options.only or ():
        if name not in labels:
            parser.error(f"--only {name!r}: there are {', '.join(dict.fromkeys(labels))}")
    for seed in options.seeds:
        if seed in rows.UNQUOTED:
            parser.error(f"--seeds {seed}: a seed of trials or of the study, which is not quoted")
    check_wikitext(NAME, options.wikitext)


def main() -> int:
    """Train the missing rows, print and write the results. Returns 1 if a row failed."""
    parser = arguments()
    options = parser.parse_args()
    common.end_on_signals()
    check(parser, options)
    if common.cannot(NAME, _lacking(options.model)):
        return common.CANNOT
    if options.precision == "bf16" and not cpu_multiplies_bf16():
        common.say("this processor has no instructions for bf16, so a row may take hours")
    with tempfile.TemporaryDirectory(prefix="dilocox-finetune-") as temporary:
        try:
            return Bench(options, (options.folder or Path(temporary)).resolve()).measure()
        except DilocoxError as error:
            common.say(f"{NAME}: {error}")
            return 1


def _lacking(model: Path) -> str | None:
    if (model / "config.json").is_file():
        return None
    return f"{model}: no model; make it with python scripts/get_smollm2.py {model}"


class Bench:
    """One call of the benchmark: its conversations, its folder and the file of its rows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._precision: Precision = options.precision or (
            "bf16" if cpu_multiplies_bf16() else "fp32"
        )
        self._folder = folder
        if options.folder is not None:
            common.claim(folder)
        self._on = common.machine()
        model = options.model.resolve()
        self._data = Conversations.write(folder / "chats", model, options.wikitext)
        self._data.tokenise(0, 2)
        self._parameters = _parameters(self._data, folder / "run")
        self._settings = {
            "parameters": self._parameters["full"],
            "adapter_parameters": self._parameters["lora"],
            "adapter": " ".join(f"{key}={value}" for key, value in ADAPTER.items()),
            "batch": BATCH,
            "sequence_length": rows.SEQUENCE_LENGTH,
            "wikitext": options.wikitext is not None,
        }

    def measure(self) -> int:
        """Train all jobs that have no row yet, then print the table. Returns the exit code."""
        path = self._options.json
        known = common.read_rows(path, NAME, self._settings)
        failures, asked = 0, 0
        for job in self._jobs(known):
            asked += 1
            if any(job.made(row) for row in known):
                continue
            self._data.tokenise(job.seed, job.sites)
            text = self._data.described(job.seed)["digest"]
            common.refuse_other_text(path, known, str(text), {"seed": job.seed})
            config = configuration(job, self._data, self._folder / "run", self._parameters)
            common.say(f"{job}: begins")
            try:
                row = train(job, config, self._folder / "run.log", self._data.held_out())
            except DilocoxError as error:
                common.say(f"{job}: {error}")
                failures += 1
                continue
            if row is None:
                common.say("stopped; started again, the benchmark goes on with this row")
                return 130
            known.append({**row, "text": text})
            if path is not None:
                common.write_json(path, NAME, self._on, self._settings, known)
            common.say(f"{job}: {_result(row)}, {row['seconds']:.0f} s")
        if not asked:
            common.say(f"{NAME}: no rate is known; make the trials first, with --tune and --json")
            return 2
        if self._options.study:
            tables = [study.table(mode, known, self._precision) for mode in self._options.modes]
            print("\n".join(tables))
        else:
            print(report.table(known, self._parameters))
        return 1 if failures else 0

    def _jobs(self, known: list[Row]) -> Iterator[Job]:
        options, precision = self._options, self._precision
        if options.quick:
            for entry in rows.entries("lora"):
                if entry.label in QUICK and self._wanted(entry):
                    rate = RATES["lora"][1]
                    yield Job(entry, "lora", 2, SEEDS[0], rate, QUICK_STEPS, precision)
            return
        if options.study:
            for mode in options.modes:
                asked = study.jobs(mode, known, precision)
                yield from (job for job in asked if self._wanted(job.entry))
            return
        for mode in options.modes:
            found = [entry for entry in rows.entries(mode) if self._wanted(entry)]
            if options.tune:
                for entry in found:
                    yield from rows.trials(entry, mode, precision)
                continue
            rates = {each.label: rows.best_rate(each, mode, known, precision) for each in found}
            without = [label for label, rate in rates.items() if rate is None]
            if without:
                common.say(f"{NAME}, {mode}: without trials, so left out: {'; '.join(without)}")
            for sites in options.sites:
                for job in rows.quoted(mode, sites, tuple(options.seeds), known, precision):
                    if self._wanted(job.entry):
                        yield job

    def _wanted(self, entry: rows.Entry) -> bool:
        return self._options.only is None or entry.label in self._options.only


def _parameters(data: Conversations, folder: Path) -> dict[str, int]:
    """Return the number of trained parameters of each mode."""
    found: dict[str, int] = {}
    for mode in RATES:
        entry = rows.Entry(rows.BASELINE, "allreduce")
        config = configuration(Job(entry, mode, 2, 0, RATES[mode][0]), data, folder, found)
        files = TokenFiles.open(data.tokens(0))
        found[mode] = ModelPlan.of(config, files.vocabulary_size).trained
    return found


def _result(row: dict[str, Any]) -> str:
    if row["failed"]:
        return "diverged"
    less = f", {row['reduction_total']:,.1f}x" if row["reduction_total"] else ""
    right = "" if row["accuracy"] is None else f", {row['accuracy']:.0%} right"
    return f"loss {row['val_loss']:.4f}{less}{right}"


if __name__ == "__main__":
    sys.exit(main())
