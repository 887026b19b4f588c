"""`python -m benchmarks.gpu`: the acceptance run."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import benchmarks.gpu as package
from benchmarks.gpu import logs, wheels
from benchmarks.gpu.parts import PARTS, Part, selected
from benchmarks.gpu.results import FAIL, PASS, Results, Row, summary, table
from benchmarks.gpu.runner import ROOT, Job, Setting, order, run_all, run_part

MARGIN = 5.0
"""Seconds at the end of a call in which no part runs."""
FIRST = "machine"
ROW = ("name", "verdict", "message", "figures", "seconds")


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=(package.__doc__ or "").split("\n")[0],
        epilog=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="time of this call (9)")
    add("--json", type=Path, metavar="FILE", help="result file; an earlier one is gone on with")
    add("--list", action="store_true", help="show parts and rows, and run nothing")
    add("--only", nargs="+", default=[], metavar="NAME", help="only these parts or rows")
    add("--again", action="store_true", help="measure rows again that are done")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels to install for this call alone")
    add("--wheels-line", action="store_true", help="print the download command of the wheels")
    add("--scale", choices=["auto", "gpu", "cpu", "tiny"], default="auto",
        help="sizes; auto: gpu where PyTorch sees one, else cpu")  # fmt: skip
    add("--commit", metavar="NAME", help="the commit, where there is no git")
    add("--keep", type=Path, metavar="FOLDER", help="work there, and keep logs and run folders")
    return parser


def listing(parts: Sequence[Part] = PARTS) -> str:
    """Return a list of all parts with their rows and aims, as text."""
    lines = []
    for part in parts:
        numbers = ", ".join(map(str, part.checks))
        lines.append(f"{part.name:12} {part.seconds:4.0f} s  checks {numbers}: {part.about}")
        for row in part.rows:
            aims = "; ".join(str(aim) for aim in part.aims_of(row))
            lines.append(f"{'':14}{row}{f'  (aim: {aims})' if aims else ''}")
    return "\n".join(lines)


def commit() -> str | None:
    """Return the measured commit, followed by + if files were changed. None without git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the call as Ctrl-C does: with its parts and its files."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


def run(
    jobs: Sequence[Job], results: Results, setting: Setting, again: bool, first: Part = PARTS[0]
) -> None:
    """Read the machine's facts, then run the selected parts."""
    asked = [job for job in jobs if job[0].name != FIRST]
    # The head is not in the file yet, because the file may be of another machine.
    probe = Results(None, "", None)
    run_part(first, list(first.rows), probe, setting)
    found = probe.rows[FIRST]
    if found["verdict"] != PASS:
        said = logs.tail(setting.work / FIRST / "log.txt", logs.LAST)
        raise SystemExit(f"{said}\nthe machine could not be asked: {found['message']}".lstrip())
    results.set_head(found["figures"])
    results.add(first, {key: found[key] for key in ROW})
    known = replace(setting, scale=found["figures"]["scale"])
    run_all(order(asked, results, again), results, known)


def show(row: Row) -> None:
    """Print a row as soon as it is measured."""
    print(table([row]), file=sys.stderr, flush=True)


def told(words: Sequence[str]) -> str:
    """Return the command without the folders of this machine."""
    plain = []
    for word in words:
        key, equals, value = word.rpartition("=")
        plain.append(f"{key}{equals}{Path(value).name if value.startswith('/') else value}")
    return shlex.join(["python", "-m", "benchmarks.gpu", *plain])


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 if a row fails."""
    words = sys.argv[1:] if words is None else words
    options = arguments().parse_args(words)
    if options.list or options.wheels_line:
        print(listing() if options.list else wheels.line())
        return 0
    began = time.monotonic()
    try:
        jobs = selected(options.only)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    results = Results(options.json, told(words), options.commit or commit())
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    # Parts run in the repository, so no path may be relative.
    work = (options.keep or Path(tempfile.mkdtemp(prefix="dilocox-gpu-"))).absolute()
    try:
        path = ""
        if options.wheels is not None:
            wheels.install(options.wheels, work / "wheels")
            path = str(work / "wheels")
        deadline = began + 60.0 * options.minutes - MARGIN
        setting = Setting(
            options.scale, work, deadline, path, show,
            None if options.json is None else options.json.absolute().with_suffix(".log"),
            options.keep is None,
        )  # fmt: skip
        run(jobs, results, setting, options.again)
    finally:
        if options.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    rows = list(results.rows.values())
    print(table(rows))
    print(summary(rows))
    return 1 if any(row["verdict"] == FAIL for row in rows) else 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
