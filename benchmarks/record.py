"""Measures the cost of a run's record: throughput with and without it, and bytes per round.

Two real sites of one rank each train together, in runs that differ in `[record]` only: `off`, `on`
(the default: signed statements, commitments, payloads and theta_0 in the store) and `states` (also
the state of every round for audits, the most expensive setting). Each run is measured together with
a reference run without a record at the same time. Both have a control group with a hard quota of
half of 90 % of the machine. The machine therefore affects both equally, and the record's work is
taken from training. The pair `off` shows how much two equal runs differ.

`ratio` is the wall-clock tokens/s over those of the reference run, in the seconds in which both
were in measured rounds. It is the median of the repetitions, with a 95 % bootstrap interval. On a
shared machine it varies by one or two per cent. `work` does not vary. It is the processor time of
exchanges, record and coordinator in these seconds, without the sites' training threads, as a share
of the run's total processor time. The same share of the reference run is subtracted. Copies for
`states` in the training threads are only in `ratio`. Bytes of log, payloads, states per round and
theta_0 come from the records.

The model is small (0.9M parameters) and rounds are short (10 inner steps), so the record's share is
larger than in any realistic run. Every pair of runs is written when it is done; started again with
the same --json, the benchmark continues. It takes about twenty minutes, six with --quick. A
measurement needs root and control groups; without them the benchmark prints one line and exits with
code 3.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import STATES
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import check_log, read_log
from dilocox.record.verify.run_history import RunHistory, read_history
from dilocox.tools.testbed import cgroups, cleanup, watchdog
from dilocox.tools.testbed.commands import PREFIX, LabError
from dilocox.tools.testbed.results import rounds_by_site
from dilocox.tools.testbed.testbed import MOST

SITES = ("paris", "lyon")
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "on": {},
    "states": {"states_every": 1},
}
WARM_UP_ROUNDS = 2
INNER_STEPS = 10
LIMIT = 600.0
"""Seconds after which two runs are aborted."""
LOOK = 0.25
"""Seconds between two readings of the threads' processor time."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Used:
    """Processor time of a run's processes up to a moment, in seconds."""

    moment: float
    """Seconds since 1970."""
    training: float
    """Seconds of the ranks' main threads, which compute inner steps and landings, and begin
    exchanges."""
    beside: float
    """Seconds of all other threads."""


def used(group: Path, proc: Path = Path("/proc")) -> Used:
    """Return the processor time of a control group's processes, without those that just ended."""
    training = beside = 0.0
    for process in cgroups.members(group):
        for task in (proc / str(process) / "task").glob("*/stat"):
            try:
                text = task.read_text()
            except OSError:
                continue
            name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :]
            seconds = sum(map(int, rest.split()[11:13])) / TICKS
            # A rank's name is SITE:STAGE.SHARD. The id of its main thread is that of the process.
            if ":" in name and int(task.parent.name) == process:
                training += seconds
            else:
                beside += seconds
    return Used(time.time(), training, beside)


def work_share(course: Sequence[Used], begin: float, end: float) -> float:
    """Return the share of processor time from `begin` to `end` outside of the training threads."""
    inside = [each for each in course if begin <= each.moment <= end]
    beside = inside[-1].beside - inside[0].beside
    return beside / (beside + inside[-1].training - inside[0].training)


def run_file(root: Path, name: str, record: Mapping[str, Any], rounds: int) -> Path:
    """Write a run file and return its path."""
    content = {
        "run": {"name": name, "folder": str(root / "{name}")},
        "model": {"architecture": common.MODEL},
        "data": {
            "source": "python-stdlib", "folder": str(root / "data"), "vocabulary_size": 1024,
            "sequence_length": 128, "max_documents": 100, "validation_sequences": 8,
        },
        "site": {"batch_size": 8, "micro_batch_size": 4, "threads": 1, "device": "cpu"},
        "outer": {"rounds": rounds, "inner_steps": INNER_STEPS, "fragments": 2},
        "control": {"adapt": "off"},
        "network": {"heartbeat": 30.0},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "record": dict(record),
        "sites": {site: {} for site in SITES},
    }  # fmt: skip
    return common.write_run_file(root, name, content)


class RunError(Exception):
    """A run that failed."""


@contextlib.contextmanager
def quotas(hierarchy: cgroups.Hierarchy) -> Iterator[list[Path]]:
    """Make two groups, each with half of the cores that a lab may have. Raises `LabError`.

    At the end, processes that are left in the groups are killed.
    """
    cleanup.remove_left_over()
    cores = MOST * (os.cpu_count() or 1) / 2
    groups: list[Path] = []
    try:
        for number in range(2):
            groups.append(cgroups.make(hierarchy, f"{PREFIX}{os.getpid()}-record{number}", cores))
        yield groups
    finally:
        for group in groups:
            cleanup.remove_group(group)


def train_beside(
    root: Path, runs: Mapping[str, Mapping[str, Any]], groups: Sequence[Path], rounds: int
) -> dict[str, list[Used]]:
    """Train two runs at the same time, each in its group. `runs`: `[record]` by name of the run.

    Returns, by name, the readings of the run's processor time. Raises `RunError` with the last
    output of a run that failed.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    courses: dict[str, list[Used]] = {name: [] for name in runs}
    try:
        for (name, record), group in zip(runs.items(), groups, strict=True):
            file = run_file(root, name, record, rounds)
            with (root / f"{name}.log").open("w") as said:
                processes[name] = subprocess.Popen(
                    cgroups.entered(group, [sys.executable, "-m", "dilocox", "train", str(file)]),
                    stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                )  # fmt: skip
        end = time.monotonic() + LIMIT
        while any(process.poll() is None for process in processes.values()):
            if time.monotonic() > end:
                raise RunError(f"{' and '.join(runs)}: no end within {LIMIT:g} s")
            for (name, process), group in zip(processes.items(), groups, strict=True):
                if process.poll() is None:
                    courses[name].append(used(group))
            time.sleep(LOOK)
        for name, process in processes.items():
            if process.returncode != 0:
                last = (root / f"{name}.log").read_text()[-1500:]
                raise RunError(f"{name}: ended with code {process.returncode}\n{last}")
        return courses
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def speeds(*runs: Sequence[dict[str, Any]]) -> tuple[list[float], float, float]:
    """Return each run's tokens per second, and begin and end of the measured time.

    The measured time is the time in which all sites of all runs are in measured rounds. Tokens are
    those of all sites of a run, by their reports of rounds. Raises `LabError` if a site was absent
    in a round.
    """
    own = [list(rounds_by_site(records, SITES).values()) for records in runs]
    begin = max(rounds[WARM_UP_ROUNDS - 1]["time"] for sites in own for rounds in sites)
    end = min(rounds[-1]["time"] for sites in own for rounds in sites)
    found = []
    for sites in own:
        courses = [common.course_of(rounds) for rounds in sites]
        trained = sum(common.tokens_at(c, end) - common.tokens_at(c, begin) for c in courses)
        found.append(trained / (end - begin))
    return found, begin, end


def read_record(folder: Path) -> tuple[RunHistory, list[str]]:
    """Return the history that a run's log states, with checked signatures, and the log's lines."""
    content = read_log(folder / "record")
    key = NoteKey.parse(content.public)
    check_log(content, key)
    return read_history(content.entries, key), list(content.entries)


def kept(folder: Path) -> dict[str, int]:
    """Return the bytes of each object in a run's store, by SHA-256."""
    store = folder / "record" / "store" / "sha256"
    return {path.parent.name + path.name: path.stat().st_size for path in store.glob("*/*")}


def state_bytes(folder: Path) -> int:
    """Return the bytes of states that a run keeps for audits, over both sites.

    The result is the mean over the rounds that have states.
    """
    rounds = list((folder / "record" / "store" / STATES).glob("*"))
    files = [path for each in rounds for path in each.rglob("*") if path.is_file()]
    return round(sum(path.stat().st_size for path in files) / max(1, len(rounds)))


def bytes_of(
    course: RunHistory, entries: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, float | int]:
    """Return the bytes of a record per training round, over both sites.

    `sizes`: see `kept`. `other_bytes` are the bytes of objects other than payloads: theta_0 and
    small documents.
    """
    rounds = len({step.key.round for step in course.steps.values() if not step.flush})
    payloads = {d for step in course.steps.values() for d in step.payloads.values()}
    trained = {d for step in course.steps.values() if not step.flush
               for d in step.payloads.values()}  # fmt: skip
    # theta_0, and the lists of tensors of the first and the last state, are stored once per run.
    listed = {state.listing for state in course.states}
    before = {d for d in sizes if d not in payloads and d not in listed}
    kinds = Counter[str]()
    for entry in entries:
        kinds[s.opened(entry)[0].kind] += len(entry) + 1
    within = sum(size for kind, size in kinds.items() if kind not in (s.MANIFEST, s.ENROLMENT))
    return {
        "rounds": rounds,
        "log_bytes_per_round": round(within / rounds),
        "commitment_bytes_per_round": round(kinds[s.COMMITMENT] / rounds),
        "payload_bytes_per_round": round(sum(sizes.get(d, 0) for d in trained) / rounds),
        "other_bytes": sum(sizes[d] for d in before),
    }


def rows_of(pairs: Sequence[common.Row]) -> list[common.Row]:
    """Return one row per setting from the measured pairs."""
    rows = []
    for name in SETTINGS:
        own = [pair for pair in pairs if pair["record"] == name]
        if not own:
            continue
        ratio = common.median_interval([p["tokens_per_second"] / p["beside"] for p in own])
        work = common.median_interval([p["work"] - p["work_beside"] for p in own])
        row: common.Row = {
            "record": name,
            "pairs": len(own),
            "ratio": round(ratio.median, 4),
            "ratio_low": round(ratio.low, 4),
            "ratio_high": round(ratio.high, 4),
            "work": round(work.median, 5),
            "work_low": round(work.low, 5),
            "work_high": round(work.high, 5),
        }
        said = {key: value for key, value in own[0].items() if key.endswith("_per_round")}
        if name != "off":
            # With the default settings a store has theta_0 and few other objects.
            theta = next((p["other_bytes"] for p in pairs if p["record"] == "on"), None)
            said |= {} if theta is None else {"theta_bytes": theta}
        rows.append(row | said)
    return rows


def measured(
    root: Path, before: Sequence[common.Row], rounds: int, repetitions: int
) -> Iterator[common.Row]:
    """Yield the pairs of runs that are missing in `before`.

    Raises `RunError`, `LabError` and `CommandError`.
    """
    hierarchy = cgroups.find()
    assert hierarchy is not None
    common.say("preparing token files")
    file = run_file(root, "prepare", SETTINGS["off"], rounds)
    common.run_dilocox("data", "prepare", str(file))
    wanted = [(turn, name) for turn in range(repetitions) for name in SETTINGS]
    for turn, name in wanted[len(before) :]:
        measuring, reference = f"{name}-{turn}", f"beside-{name}-{turn}"
        runs = {measuring: SETTINGS[name], reference: SETTINGS["off"]}
        # The run that begins, and the group of each run, change from turn to turn.
        order = list(runs) if turn % 2 == 0 else list(runs)[::-1]
        with watchdog.watched(), quotas(hierarchy) as groups:
            courses = train_beside(
                root, {run: runs[run] for run in order}, groups, WARM_UP_ROUNDS + rounds
            )
        (own, beside), begin, end = speeds(
            read_metrics(root / measuring), read_metrics(root / reference)
        )
        row: common.Row = {
            "record": name,
            "turn": turn,
            "tokens_per_second": round(own, 1),
            "beside": round(beside, 1),
            "work": round(work_share(courses[measuring], begin, end), 5),
            "work_beside": round(work_share(courses[reference], begin, end), 5),
        }
        if name != "off":
            row |= bytes_of(*read_record(root / measuring), kept(root / measuring))
            row["state_bytes_per_round"] = state_bytes(root / measuring)
        more = row["work"] - row["work_beside"]
        common.say(
            f"{measuring}: {own:,.0f} tokens/s, {own / beside:.2%} of the run beside it; "
            f"{more:+.2%} of the processor"
        )
        yield row


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    options = common.parser(__doc__ or "")
    count = common.positive
    options.add_argument("--pairs", type=count, help="repetitions (default: 6, with --quick 2)")
    options.add_argument("--rounds", type=count, help="measured rounds per run (default: 20)")
    told = options.parse_args()
    common.end_on_signals()
    rounds = told.rounds or 20
    repetitions = told.pairs or (2 if told.quick else 6)
    settings = {
        "sites": len(SITES), "inner_steps": INNER_STEPS, "fragments": 2, "codec": "int4",
        "warm_up_rounds": WARM_UP_ROUNDS, "measured_rounds": rounds,
    }  # fmt: skip
    single = None if told.json is None else told.json.with_name(f"{told.json.stem}-pairs.json")
    pairs = common.read_rows(single, "record-pairs", settings)
    if len(pairs) < repetitions * len(SETTINGS):
        if common.cannot("record", cgroups.unsupported_reason(cgroups.find())):
            return common.CANNOT
        on = common.machine()
        if pairs:
            common.refuse_other_machine(single, on)
        try:
            with tempfile.TemporaryDirectory(prefix="dilocox-record-") as folder:
                for row in measured(Path(folder), pairs, rounds, repetitions):
                    pairs.append({**row, "commit": common.commit()})
                    if single is not None:
                        common.write_json(single, "record-pairs", on, settings, pairs)
                        common.write_json(told.json, "record", on, settings, rows_of(pairs))
        except (RunError, LabError, common.CommandError) as error:
            print(f"record: {error}", file=sys.stderr)
            return 1
    rows = rows_of(pairs)
    print(
        common.table(
            rows,
            {
                "record": "s",
                "pairs": "d",
                "ratio": ".4f",
                "ratio_low": ".4f",
                "ratio_high": ".4f",
                "work": ".4f",
                "work_low": ".4f",
                "work_high": ".4f",
                "log_bytes_per_round": ",.0f",
                "commitment_bytes_per_round": ",.0f",
                "payload_bytes_per_round": ",.0f",
                "state_bytes_per_round": ",.0f",
            },
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
