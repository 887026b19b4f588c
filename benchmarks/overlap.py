"""Measures the share of exchanges that computation hides at two sites, per overlap rule.

Two real sites of one stage each train together: `dilocox coordinator` and two `dilocox join`, each
in a network namespace of its own. The links between the sites are shaped by `tc tbf` both ways and
measured before anything else; if a link is off by more than 5 %, nothing is
reported. Each site has one CPU core by affinity. All of its threads share that core, including the
threads that encode and send, so that hiding has its real cost. There is no hard CPU quota.

First each site trains alone, both at the same time (two runs of one site). This gives the speed
without exchanges, and the time of a round of pure computation. The link is then shaped so that one
round's payloads take 0.6 of that time. Without overlap the exchange would thus cost about three
eighths of every round. Then the two sites train together once per overlap rule; only
`outer.overlap` and `outer.delay` differ.

Figures per rule are over all measured rounds and both sites:

- seconds per round with an exchange in flight;
- seconds in which training waited for data or for its lease;
- the hidden share (1 - waited / exchange);
- tokens/s by wall-clock time, and their ratio to the sites alone.

Needs root, iproute2 and two cores; without them it prints one line and exits with code 3.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dilocox
from benchmarks import common
from dilocox.config.run_config import RunConfig
from dilocox.models import count_parameters, load_model_config
from dilocox.tools.testbed import LabError, Network, unsupported_reason, verify_links, watchdog
from dilocox.tools.testbed.netns import FRAME_BYTES, SEGMENT_BYTES

SITES = ("paris", "lyon")
EXCHANGE_SHARE = 0.6
"""Time of a round's payloads on the link, as a share of the round's computing time."""
WARM_UP_ROUNDS = 2
LIMIT = 300.0
"""Seconds after which a run is aborted."""
INNER_STEPS = 20
INT4_BYTES = 4 / 8 + 2 / 128
"""Payload bytes per value: the code, and the scale that 128 values share."""


@dataclass(frozen=True)
class Setting:
    """An overlap rule and its delay, in slots; a slot is one inner step."""

    overlap: str
    delay: int

    @property
    def name(self) -> str:
        """Short name for the run folder and the row."""
        return f"{self.overlap}-{self.delay}"


NONE = Setting("none", 0)
KEEP_SHORT = Setting("keep", INNER_STEPS // 4)
KEEP_ROUND = Setting("keep", INNER_STEPS)
NAIVE = Setting("naive", INNER_STEPS)
KEEP_TIGHT = Setting("keep", 2)
QUICK = (NONE, KEEP_SHORT, KEEP_ROUND, NAIVE)
FULL = (NONE, KEEP_TIGHT, KEEP_SHORT, KEEP_ROUND, NAIVE)


@dataclass(frozen=True)
class Course:
    """Means of one run, or of the two runs of the sites alone, per round and site."""

    round_seconds: float
    exchange_seconds: float
    wait_seconds: float
    tokens_per_second: float
    """Tokens/s of both sites together, by wall-clock time."""
    payload_bytes: float

    @property
    def hidden_share(self) -> float:
        """Share of the exchanges' time in which training went on."""
        return 1.0 - self.wait_seconds / self.exchange_seconds


def run_file(root: Path, name: str, setting: Setting, sites: Sequence[str], rounds: int) -> Path:
    """Write a run file and return its path."""
    content = {
        "run": {"name": name, "folder": str(root / "coordinator" / "{name}")},
        "model": {"architecture": common.MODEL},
        "data": {
            "source": "python-stdlib",
            "folder": str(root / "data"),
            "vocabulary_size": 1024,
            "sequence_length": 128,
            "max_documents": 100,
            "validation_sequences": 8,
        },
        "site": {"batch_size": 8, "micro_batch_size": 4, "threads": 1, "device": "cpu"},
        "outer": {
            "rounds": rounds,
            "inner_steps": INNER_STEPS,
            "slots": INNER_STEPS,
            "fragments": 4,
            "overlap": setting.overlap,
            "delay": setting.delay,
        },
        "control": {"adapt": "off"},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "sites": {site: {} for site in sites},
    }
    return common.write_run_file(root, name, content)


class Lab:
    """The two sites and the coordinator's host, with methods that make runs on them."""

    def __init__(self, network: Network, root: Path, rounds: int) -> None:
        self._network = network
        self._root = root
        self._rounds = rounds
        cores = sorted(os.sched_getaffinity(0))
        self._cores = {site: {cores[number]} for number, site in enumerate(SITES)}
        self._rest = set(cores[len(SITES) :]) or None
        self._count = 0

    def alone(self) -> Course:
        """Train both sites at the same time, each in a run of its own."""
        self._count += 1
        runs = [
            self._start(run_file(self._root, f"{site}-{self._count}", NONE, [site], self._rounds))
            for site in SITES
        ]
        records = [record for run in runs for record in run.finish()]
        return course(records)

    def together(self, setting: Setting) -> Course:
        """Train both sites in one run."""
        self._count += 1
        name = f"{setting.name}-{self._count}"
        run = self._start(run_file(self._root, name, setting, SITES, self._rounds))
        return course(run.finish())

    def _start(self, file: Path) -> Run:
        config = dilocox.load_run(file, [f"network.host={self._network.address('hub')}"])
        return Run(self._network, self._root, file, config, self._cores, self._rest)


class Run:
    """One run: its coordinator on the host `hub`, and `dilocox join` at each site."""

    def __init__(
        self,
        network: Network,
        root: Path,
        file: Path,
        config: RunConfig,
        cores: dict[str, set[int]],
        rest: set[int] | None,
    ) -> None:
        self._config = config
        self._log = root / f"{config.run.name}.log"
        self._processes: dict[str, subprocess.Popen[str]] = {}
        host = f"network.host={network.address('hub')}"
        self._begin(network, "hub", rest, "coordinator", str(file), "--set", host)
        address, token = self._join_line()
        for site in config.sites:
            place = f"run.folder={root / site}/{{name}}"
            arguments = ["join", address, "--site", site, "--run-file", str(file)]
            arguments += ["--token-file", str(Path(token).with_name(site))]
            self._begin(network, site, cores[site], *arguments, "--set", host, "--set", place)

    def _begin(self, network: Network, host: str, cores: set[int] | None, *arguments: str) -> None:
        with self._log.open("a") as log:
            self._processes[host] = network.start(
                host,
                [sys.executable, "-m", "dilocox", *arguments],
                cores,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "HF_HUB_OFFLINE": "1",
                    "COLUMNS": "1000",
                },
            )

    def _join_line(self) -> tuple[str, str]:
        pattern = re.compile(r"dilocox join (\S+) .*--token-file (\S+)")
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self._processes["hub"].poll() is None:
            found = pattern.search(self._log.read_text(encoding="utf-8"))
            if found:
                return found[1], found[2]
            time.sleep(0.05)
        raise self._failure("the coordinator did not start")

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end. Returns the sites' records of all rounds except the last rounds."""
        deadline = time.monotonic() + LIMIT
        for host, process in self._processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._failure(f"{host} did not end within {LIMIT:g} s") from None
            if code != 0:
                raise self._failure(f"{host} ended with code {code}")
        path = self._config.folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line["kind"] == "round" and line.get("site")]

    def _failure(self, what: str) -> LabError:
        said = self._log.read_text(encoding="utf-8", errors="replace")[-1500:]
        return LabError(f"run {self._config.run.name}: {what}\n{said}")


def course(records: list[dict[str, Any]]) -> Course:
    """Return means over sites and measured rounds.

    The first `WARM_UP_ROUNDS` rounds do not count, because groups form in them. The time runs from
    the report before the first measured round to the last report.
    """
    sites = {record["site"] for record in records}
    found: dict[str, list[float]] = {"round": [], "exchange": [], "wait": [], "payload": []}
    rate = 0.0
    for site in sorted(sites):
        own = sorted((r for r in records if r["site"] == site), key=lambda r: r["round"])
        before, measured = own[WARM_UP_ROUNDS - 1], own[WARM_UP_ROUNDS:]
        wall = measured[-1]["time"] - before["time"]
        rate += sum(r["tokens"] for r in measured) / wall
        found["round"].append(wall / len(measured))
        for key, field in (
            ("exchange", "exchange_seconds"),
            ("wait", "wait_seconds"),
            ("payload", "payload_bytes"),
        ):
            found[key].append(sum(r[field] for r in measured) / len(measured))
    mean = {key: statistics.fmean(values) for key, values in found.items()}
    return Course(mean["round"], mean["exchange"], mean["wait"], rate, mean["payload"])


def link_rate(config: RunConfig, vocabulary: int, round_seconds: float) -> float:
    """Return the bits per second at which a round's payloads take `EXCHANGE_SHARE` of its computing
    time."""
    values = count_parameters(load_model_config(config.model, vocabulary))
    wire = values * INT4_BYTES * FRAME_BYTES / SEGMENT_BYTES
    return round(wire * 8 / (EXCHANGE_SHARE * round_seconds) / 1e4) * 1e4


def row(name: Setting | None, courses: list[Course], alone: Course) -> common.Row:
    """Return the row with medians over repetitions. `name` is None for the sites alone."""

    def median(field: str) -> float:
        return float(statistics.median(getattr(course, field) for course in courses))

    speed = median("tokens_per_second")
    return {
        "overlap": name.overlap if name else "alone",
        "delay_slots": name.delay if name else None,
        "round_seconds": round(median("round_seconds"), 4),
        "exchange_seconds": round(median("exchange_seconds"), 4) if name else None,
        "wait_seconds": round(median("wait_seconds"), 4) if name else None,
        "hidden_share": round(median("hidden_share"), 4) if name else None,
        "wait_share": round(median("wait_seconds") / median("round_seconds"), 4) if name else None,
        "tokens_per_second": round(speed, 1),
        "ratio": round(speed / alone.tokens_per_second, 4),
        "payload_bytes": round(median("payload_bytes")),
        "repetitions": len(courses),
    }


def rows_of(alone: list[Course], found: Mapping[Setting, list[Course]]) -> list[common.Row]:
    """Return the row of the sites alone, and the rows of the rules over its median repetition."""
    middle = sorted(alone, key=lambda item: item.tokens_per_second)[len(alone) // 2]
    rules = [row(setting, courses, middle) for setting, courses in found.items()]
    return [row(None, alone, middle), *rules]


def measure(root: Path, quick: bool) -> tuple[list[common.Row], dict[str, Any]]:
    """Make all runs. Returns the rows and the settings."""
    rounds = WARM_UP_ROUNDS + (8 if quick else 30)
    settings, repetitions = (QUICK, 1) if quick else (FULL, 3)
    common.say("preparing token files")
    file = run_file(root, "data", NONE, SITES, rounds)
    config = dilocox.load_run(file)
    common.run_dilocox("data", "prepare", str(file))
    with watchdog.watched(), Network(["hub", *SITES]) as network:
        lab = Lab(network, root, rounds)
        baseline = [lab.alone()]
        round_seconds = baseline[0].round_seconds
        rate = link_rate(config, config.data.vocabulary_size, round_seconds)
        common.say(f"alone: a round takes {round_seconds:.2f} s; link {rate / 1e6:.2f} Mbit/s")
        network.shape(dict.fromkeys(SITES, rate))
        links = verify_links(network)
        found: dict[Setting, list[Course]] = {setting: [] for setting in settings}
        for turn in range(repetitions):
            if turn:
                baseline.append(lab.alone())
            for setting in settings if turn % 2 == 0 else settings[::-1]:
                result = lab.together(setting)
                found[setting].append(result)
                common.say(
                    f"{setting.name}: exchange {result.exchange_seconds:.2f} s per round, waited "
                    f"{result.wait_seconds:.2f} s, hidden {result.hidden_share:.1%}"
                )
    described = {
        "link_bits_per_second": rate,
        "link_measured_bits_per_second": [round(link.bits_per_second) for link in links],
        "exchange_share_aimed_at": EXCHANGE_SHARE,
        "inner_steps": INNER_STEPS,
        "fragments": 4,
        "codec": "int4",
        "rounds_measured": rounds - WARM_UP_ROUNDS,
        "cores_per_site": 1,
        "cpu_quota": None,
    }
    return rows_of(baseline, found), described


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    reason = unsupported_reason()
    if reason is None and len(os.sched_getaffinity(0)) < len(SITES):
        reason = "each site needs a CPU core of its own, there is one"
    if common.cannot("overlap", reason):
        return common.CANNOT
    on = common.machine()
    root = Path(tempfile.mkdtemp(prefix="dilocox-overlap-"))
    try:
        rows, settings = measure(root, options.quick)
    except (LabError, common.CommandError) as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(root)
    print(
        common.table(
            rows,
            {
                "overlap": "s",
                "delay_slots": "d",
                "round_seconds": ".2f",
                "exchange_seconds": ".2f",
                "wait_seconds": ".2f",
                "hidden_share": ".1%",
                "tokens_per_second": ",.0f",
                "ratio": ".3f",
            },
        )
    )
    print(f"link {settings['link_bits_per_second'] / 1e6:.2f} Mbit/s; times per round and site")
    if options.json:
        common.write_json(options.json, "overlap", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
