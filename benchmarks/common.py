"""Shared code of all benchmarks: arguments, facts about the machine, intervals, result files.

A benchmark is run as `python -m benchmarks.NAME [--quick] [--json FILE]`. Its JSON file holds
`benchmark`, `command`, `machine`, `settings` (of the measurement) and `rows`, a list of flat
objects.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import functools
import hashlib
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.machine import machine as machine
from dilocox.utils.storage import overwrite

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
"""The repository."""
RESULTS = ROOT / "benchmarks" / "results"
CONFIDENCE = 0.95
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
"""Architecture of the small model of the benchmarks `overlap`, `record` and `wan`."""


@dataclass(frozen=True)
class Interval:
    """A median, and the limits between which it lies with confidence `CONFIDENCE`."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width, relative to the median. 0 if the median is 0."""
        return (self.high - self.low) / 2 / abs(self.median) if self.median else 0.0


def median_interval(values: Sequence[float], resamples: int = 4000) -> Interval:
    """Return the median of `values` with a percentile-bootstrap interval. The seed is fixed.

    Raises `ValueError` if `values` is empty.
    """
    if not values:
        raise ValueError("no values were measured")
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples)
    )
    cut = int(resamples * (1 - CONFIDENCE) / 2)
    return Interval(statistics.median(values), medians[cut], medians[-1 - cut])


def parser(description: str, *, quick: bool = True) -> argparse.ArgumentParser:
    """Return a parser of `--json FILE`, and of `--quick` unless `quick` is False.

    The first line of `description` is the summary of `--help`, the whole text its epilog.
    """
    commit()  # the code of this moment is what this process measures
    made = argparse.ArgumentParser(
        description=description.strip().splitlines()[0],
        epilog=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if quick:
        made.add_argument("--quick", action="store_true", help="fewer repetitions, wider intervals")
    made.add_argument(
        "--json", type=_results_file, metavar="FILE", help="also write the results there"
    )
    return made


def _results_file(text: str) -> Path:
    """Return the path of a file that can be written. Raises `argparse.ArgumentTypeError`."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"{above} is no folder that can be written to")
    return path


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise an exception, as Ctrl-C does, so that the process cleans up."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


CANNOT = 3
"""Exit code of a benchmark that cannot run on this machine."""
AS_FAST = 1.25
"""Largest factor by which speeds of the same machine differ between two measurements."""


def cannot(benchmark: str, reason: str | None) -> bool:
    """Print `reason`, why the benchmark cannot run here. Returns whether there is a reason."""
    if reason is not None:
        print(f"{benchmark}: cannot be measured here: {reason}", file=sys.stderr)
    return reason is not None


def command() -> str:
    """Return the command line, with the benchmark's name as from the repository's root."""
    script = Path(sys.argv[0]).resolve().with_suffix("")
    steps = script.parts[script.parts.index("benchmarks") :] if "benchmarks" in script.parts else ()
    module = ".".join(step for step in steps if step != "__main__") or script.name
    return shlex.join(["python", "-m", module, *_told()])


def _told() -> list[str]:
    """Return the arguments of the command line without folders of this machine."""
    told = []
    for argument in sys.argv[1:]:
        key, equals, value = argument.rpartition("=")
        value = Path(value).name if value.startswith("/") else value
        told.append(f"{key}{equals}{value}")
    return told


def today() -> str:
    """Return the date in UTC. A file has the date of its last call; a row may have its own."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


NOT_CODE = ("benchmarks/results", "docs")
"""Folders that a benchmark writes to. A change there does not make the measured code another."""


@functools.cache
def commit() -> str | None:
    """Return the measured commit, followed by + if files of code were changed. None without git.

    The first call decides for the whole process, since a process keeps the code that it loaded at
    its start. `parser` makes this call.
    """
    try:
        name = _git("describe", "--always", "--exclude=*")
        code = [":(top)", *(f":(top,exclude){folder}" for folder in NOT_CODE)]
        changed = _git(
            "--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", *code
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{name}+" if changed else name


def _git(*words: str) -> str:
    """Return what git prints in the repository of this file."""
    said = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return said.stdout.strip()


class CommandError(Exception):
    """A command that failed. Its own message is on standard error."""


def run_dilocox(*arguments: str) -> None:
    """Run a command of dilocox without its standard output. Raises `CommandError` if it fails."""
    command = [sys.executable, "-m", "dilocox", *arguments]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise CommandError(f"dilocox {' '.join(arguments)}: ended with code {code}")


def write_run_file(root: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write `content` as the run file NAME.toml in `root`, and return its path."""
    path = root / f"{name}.toml"
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


def write_json(
    path: Path,
    benchmark: str,
    on: Mapping[str, Any],
    settings: Mapping[str, Any],
    rows: Sequence[Row],
) -> None:
    """Write results atomically, so that a kill never costs the results that were there before.

    `on`: the result of `machine()` before the measurement.
    """
    for row in rows:
        for key, value in row.items():
            if value is not None and not isinstance(value, str | int | float | bool):
                raise TypeError(f"row value {key} is a {type(value).__name__}, rows are flat")
    content = {
        "benchmark": benchmark,
        "command": command(),
        "commit": commit(),
        "date": today(),
        "machine": dict(on),
        "settings": dict(settings),
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    overwrite(path, json.dumps(content, indent=2) + "\n")


def hours_of_both_cores(rows: Sequence[Row]) -> float:
    """Return the hours for which rows took two cores, by the processor time of their runs."""
    return sum(float(row["cpu_seconds"]) for row in rows) / 2 / 3600


_CLAIMED: dict[Path, int] = {}
"""Open lock files of this process, by the path that each one stands for."""


def claim(path: Path) -> None:
    """Hold a file or a folder until this process ends.

    Ends the program if another process holds the path: each benchmark writes all of its rows, and
    would overwrite those of the other one.
    """
    target = path.resolve()
    if target in _CLAIMED:
        return
    name = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    lock = Path(tempfile.gettempdir()) / f"dilocox-benchmark-{os.getuid()}-{name}.lock"
    held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise SystemExit(f"{path}: another benchmark uses it; wait, or name another") from None
    _CLAIMED[target] = held


def read_rows(
    path: Path | None, benchmark: str, settings: Mapping[str, Any], claimed: bool = True
) -> list[Row]:
    """Return the rows that an earlier call with the same settings has written.

    Ends the program if the file is of another benchmark or has other settings, or if another
    process writes to the file. `claimed`: this process will write to it.
    """
    if path is not None and claimed:
        claim(path)
    if path is None or not path.exists():
        return []
    found = read_results(path, benchmark)
    known = found.get("settings", {})
    for key, wanted in settings.items():
        if known.get(key) != wanted:
            raise SystemExit(
                f"{path}: holds results of other settings ({key} is {_shown(known.get(key))} "
                f"there, {_shown(wanted)} here); remove it, or name another"
            )
    rows: list[Row] = found["rows"]
    return rows


def read_results(path: Path, benchmark: str) -> dict[str, Any]:
    """Return the content of a results file. Ends the program if the file is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: cannot be read as results ({error}); name another") from None
    if not isinstance(found, dict) or found.get("benchmark") != benchmark:
        raise SystemExit(f"{path}: holds no results of {benchmark}; name another file")
    return found


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse_other_text(
    path: Path | None, rows: Sequence[Row], text: str, key: Mapping[str, object]
) -> None:
    """End the program if a row of `rows` names another text than `text`.

    Losses of two texts cannot be compared. `key` has the fields that decide the text, such as the
    seed: rows that differ in them do not count. Rows of earlier versions name no text.
    """
    for row in rows:
        other = row.get("text") not in (None, text)
        if other and all(row.get(k) == v for k, v in key.items()):
            named = ", ".join(f"{k} {v}" for k, v in key.items())
            raise SystemExit(
                f"{path}: its rows of {named} are of another text ({row['text'][:12]}) than this "
                f"call has ({text[:12]}); give the same text, or name another file"
            )


def positive(text: str) -> int:
    """Return a number of the command line that must be 1 or more.

    Raises `argparse.ArgumentTypeError`.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number of 1 or more")
    return number


def refuse_other_machine(path: Path | None, on: Mapping[str, Any]) -> None:
    """End the program if the results in `path` are of another machine than `on` (`machine`):
    speeds of two machines cannot be compared."""
    if path is None or not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8")).get("machine", {})
    named = [key for key in ("cpu", "instructions", "cores") if before.get(key) != on.get(key)]
    speeds = [float(each.get("core_gflops", 0)) for each in (before, on)]
    if named or max(speeds) > AS_FAST * min(speeds):
        told = " and ".join(
            f"{each.get('cpu')} with {each.get('cores')} cores, {each.get('instructions')}, "
            f"{each.get('core_gflops')} GFLOP/s a core"
            for each in (before, on)
        )
        raise SystemExit(
            f"{path}: measured on another machine than this ({told}); name another file by --json"
        )


def table(rows: Sequence[Row], columns: Mapping[str, Callable[[Any], str] | str]) -> str:
    """Return the rows as aligned text. `columns` maps a key to a format such as `,.0f` or to a
    function."""
    lines = [list(columns)]
    for row in rows:
        line = []
        for key, show in columns.items():
            value = row.get(key)
            if value is None:
                line.append("-")
            else:
                line.append(show(value) if callable(show) else format(value, show))
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def congestion() -> str:
    """Return this machine's default TCP congestion control. Linux only."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


Course = Sequence[tuple[float, float]]
"""(seconds since 1970, tokens so far) at the ends of a site's rounds, in their order."""


def course_of(rounds: Sequence[Mapping[str, Any]]) -> Course:
    """Return a site's times and tokens at the ends of its rounds."""
    found: list[tuple[float, float]] = []
    tokens = 0.0
    for record in rounds:
        tokens += record["tokens"]
        found.append((record["time"], tokens))
    return found


def tokens_at(course: Course, moment: float) -> float:
    """Return the number of tokens that a site had trained on at `moment`.

    Interpolates within a round. Raises `ValueError` if no round of the site includes `moment`.
    """
    for (start, before), (end, after) in itertools.pairwise(course):
        if start <= moment <= end:
            return before + (after - before) * (moment - start) / (end - start)
    raise ValueError(f"no round of {course[0][0]:.1f} to {course[-1][0]:.1f} has {moment:.1f}")


def say(text: str) -> None:
    """Print a line of progress to stderr. Standard output is for the table only."""
    print(text, file=sys.stderr, flush=True)


def mebibytes(value: float) -> str:
    """Return bytes as text in MiB."""
    return f"{value / 2**20:,.0f} MiB"


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process and all of its living descendants."""
    total = 0.0
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        total = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += cpu_seconds(int(child))
    return total
