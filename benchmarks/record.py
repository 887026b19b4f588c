"""What a run's record costs: throughput with and without it, and bytes per round.

Two real sites of one rank each train together on this machine, in runs that differ in `[record]`
alone: `off`, `on` (the default: signed statements, commitments, payloads and theta_0 in the store)
and `states` (besides, the state of every round for audits, the dearest setting there is). Runs are
interleaved: every repetition has one of each, in turned order from one to the next, and a run with
a record is compared with the run without one of its own repetition.

Per setting: tokens/s by the clock on the wall over the measured rounds, and processor time of all
processes together, start included; each as the median of its ratios to `off`, with a 95 % bootstrap
interval. From the records themselves: bytes of log, payloads and states per round, theta_0 besides.

The model is small (0.9M parameters) and rounds are short (10 inner steps), so that the record's
share is larger than in any run worth the name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

from dilocox.record import statements as s
from dilocox.record.course import Course, read_course
from dilocox.record.log import check_log, read_log
from dilocox.record.note import NoteKey

SITES = ("paris", "lyon")
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "on": {},
    "states": {"states_every": 1},
}
WARM_UP_ROUNDS = 2
INNER_STEPS = 10
LIMIT = 300.0
"""Seconds after which one run is given up."""


@dataclass(frozen=True)
class Cost:
    """What one run came to."""

    tokens_per_second: float
    """Of both sites together."""
    cpu_seconds: float
    """Of all processes, start included."""


def run_file(root: Path, name: str, record: Mapping[str, Any], rounds: int) -> Path:
    """Write a run file and return its path."""
    content = {
        "run": {"name": name, "folder": str(root / "{name}")},
        "model": {
            "architecture": {
                "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 384,
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 32, "max_position_embeddings": 128, "tie_word_embeddings": True,
            }
        },
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
    """A run that did not end well."""


def train(root: Path, name: str, record: Mapping[str, Any], rounds: int) -> Cost:
    """One run to its end. Raises `RunError` with what it said last."""
    file, log = run_file(root, name, record, rounds), root / f"{name}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "dilocox", "train", str(file)],
            stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            code, cpu = waited(process)
        finally:
            process.kill()
    if code != 0:
        raise RunError(f"{name}: ended with code {code}\n{log.read_text()[-1500:]}")
    return Cost(speed(read_rounds(root / name)), cpu)


def waited(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Exit code, and processor time of it and all that it has waited for. Raises `RunError`."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        time.sleep(0.05)
    raise RunError(f"no end within {LIMIT:g} s")


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The sites' reports of their rounds."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "round" and r.get("site")]


def speed(records: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per second of all sites, from the report before the first measured round on."""
    total = 0.0
    for site in sorted({record["site"] for record in records}):
        own = sorted((r for r in records if r["site"] == site), key=lambda r: r["round"])
        before, measured = own[WARM_UP_ROUNDS - 1], own[WARM_UP_ROUNDS:]
        total += sum(r["tokens"] for r in measured) / (measured[-1]["time"] - before["time"])
    return total


def read_record(folder: Path) -> tuple[Course, list[str]]:
    """What the log of a run says, signatures checked, and its lines."""
    content = read_log(folder / "record")
    key = NoteKey.parse(content.public)
    check_log(content, key)
    return read_course(content.entries, key), content.entries


def kept(folder: Path) -> dict[str, int]:
    """Bytes of what the store of a run holds, by SHA-256."""
    store = folder / "record" / "store" / "sha256"
    return {path.parent.name + path.name: path.stat().st_size for path in store.glob("*/*")}


def bytes_of(
    course: Course, entries: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, float | int]:
    """Bytes of a record per training round, over both sites; `sizes`: as `kept` has them.

    What is not a payload of a training round or of the flush, nor theta_0, is a state.
    """
    rounds = len({step.key.round for step in course.steps.values() if not step.flush})
    payloads = {d for step in course.steps.values() for d in step.payloads.values()}
    trained = {d for step in course.steps.values() if not step.flush
               for d in step.payloads.values()}  # fmt: skip
    # theta_0, and the lists of tensors of the first and the last state, are kept once for all.
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


def rows_of(
    costs: Mapping[str, Sequence[Cost]], found: Mapping[str, Mapping[str, float | int]]
) -> list[common.Row]:
    """One row per setting; `costs` by setting, in the order of the repetitions."""
    rows = []
    for name, own in costs.items():
        row: common.Row = {"record": name, "repetitions": len(own)}
        for key, better in (("tokens_per_second", ""), ("cpu_seconds", "cpu_")):
            values = [getattr(each, key) for each in own]
            row[key] = round(common.median_interval(values).median, 2)
            pairs = zip(values, costs["off"], strict=True)
            ratio = common.median_interval([value / getattr(o, key) for value, o in pairs])
            row |= {
                f"{better}ratio": round(ratio.median, 4),
                f"{better}ratio_low": round(ratio.low, 4),
                f"{better}ratio_high": round(ratio.high, 4),
            }
        said = dict(found.get(name, {}))
        if said:
            # Without states the store holds theta_0 and little else: what is more, are states.
            rounds, theta = said.pop("rounds"), found["on"]["other_bytes"]
            said["state_bytes_per_round"] = round((said.pop("other_bytes") - theta) / rounds)
            said["theta_bytes"] = theta
        rows.append(row | said)
    return rows


def measure(root: Path, rounds: int, repetitions: int) -> list[common.Row]:
    """All runs; their rows."""
    common.say("preparing token files")
    file = run_file(root, "prepare", SETTINGS["off"], rounds)
    subprocess.run(
        [sys.executable, "-m", "dilocox", "data", "prepare", str(file)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    costs: dict[str, list[Cost]] = {name: [] for name in SETTINGS}
    found = {}
    names = list(SETTINGS)
    for turn in range(repetitions):
        for name in names if turn % 2 == 0 else names[::-1]:
            run = f"{name}-{turn}"
            cost = train(root, run, SETTINGS[name], WARM_UP_ROUNDS + rounds)
            costs[name].append(cost)
            common.say(
                f"{run}: {cost.tokens_per_second:,.0f} tokens/s, {cost.cpu_seconds:.1f} s of "
                "processor time"
            )
            if name != "off" and name not in found:
                found[name] = bytes_of(*read_record(root / run), kept(root / run))
    return rows_of(costs, found)


def main() -> int:
    """Measure, print, write."""
    options = common.parser(__doc__ or "")
    options.add_argument("--pairs", type=int, help="repetitions (default: 12, with --quick 4)")
    options.add_argument("--rounds", type=int, help="measured rounds per run (default: 20, 8)")
    told = options.parse_args()
    common.end_on_signals()
    on = common.machine()
    rounds = told.rounds or (8 if told.quick else 20)
    repetitions = told.pairs or (4 if told.quick else 12)
    with tempfile.TemporaryDirectory(prefix="dilocox-record-") as folder:
        try:
            rows = measure(Path(folder), rounds, repetitions)
        except RunError as error:
            print(f"record: {error}", file=sys.stderr)
            return 1
    print(
        common.table(
            rows,
            {
                "record": "s",
                "tokens_per_second": ",.0f",
                "ratio": ".4f",
                "ratio_low": ".4f",
                "ratio_high": ".4f",
                "cpu_ratio": ".4f",
                "cpu_ratio_low": ".4f",
                "cpu_ratio_high": ".4f",
                "log_bytes_per_round": ",.0f",
                "commitment_bytes_per_round": ",.0f",
                "payload_bytes_per_round": ",.0f",
                "state_bytes_per_round": ",.0f",
            },
        )
    )
    if told.json:
        settings = {
            "sites": len(SITES), "inner_steps": INNER_STEPS, "fragments": 2, "codec": "int4",
            "warm_up_rounds": WARM_UP_ROUNDS, "measured_rounds": rounds, "pairs": repetitions,
            "commit": common.commit(),
        }  # fmt: skip
        common.write_json(told.json, "record", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
