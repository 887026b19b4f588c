"""Real runs for tests: the command line in a process of its own, watched through its files.

Runs of a `Workshop` are forked from its `Forge` (see `tests.support.forge`). `Run` itself starts a
fresh interpreter, as a user does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.forge import Forge

ARCHITECTURE = """\
[model.architecture]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
max_position_embeddings = 128
tie_word_embeddings = true
"""

RUN = """\
[run]
name = "{name}"
folder = "{root}/{{name}}"
{model}
[data]
source = "{text}"
vocabulary_size = 300
sequence_length = 32
folder = "{root}/data"
validation_sequences = 8
[site]
stages = 2
batch_size = 4
micro_batch_size = 2
threads = 1
precision = "fp32"
[inner]
learning_rate = 3e-3
warmup_steps = 4
[outer]
rounds = 3
inner_steps = 8
fragments = 2
[control]
adapt = "off"
[evaluation]
completion_tokens = 0
[network]
link_timeout = 60.0
heartbeat = 2.5
{sites}
"""
LIMIT = 270.0
"""Seconds after which a test gives up on a run."""
PATIENT = "network.heartbeat=20"
"""For runs that nobody kills or stops: another test may run beside them."""


def write_corpus(folder: Path) -> Path:
    """A small text corpus of real prose: this repository's own sources are not touched."""
    import email
    import json as json_package

    text = folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    for package in (email, json_package):
        for file in sorted(Path(package.__file__).parent.glob("*.py")):
            (text / f"{package.__name__}-{file.name}.txt").write_bytes(file.read_bytes())
    return text


@dataclass
class Workshop:
    """A folder with a corpus, its token files and any number of runs, forked from `forge`."""

    root: Path
    text: Path
    forge: Forge
    runs: list[Run] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    """Test file by the name of a run. All files that one process tests share this folder."""

    def end_all(self) -> None:
        """Kill what a failed test has left."""
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
        self.runs.clear()

    def run_file(
        self,
        name: str,
        *sets: str,
        sites: Sequence[str] = ("paris", "lyon"),
        model: str = ARCHITECTURE,
    ) -> list[str]:
        """Command-line arguments of a run called `name`: its file and its overrides."""
        here = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        owner = self.owners.setdefault(name, here)
        assert owner == here, f"{owner} has a run called {name}, too: choose another name"
        kind = "run" if model == ARCHITECTURE else f"run-{name}"
        file = self.root / f"{kind}-{'-'.join(sites)}.toml"
        if not file.exists():
            tables = "\n".join(f"[sites.{site}]" for site in sites)
            text = RUN.format(name="run", root=self.root, model=model, text=self.text, sites=tables)
            file.write_text(text, encoding="utf-8")
        arguments = [str(file), "--set", f"run.name={name}"]
        for item in sets:
            arguments += ["--set", item]
        return arguments

    def folder(self, name: str) -> Path:
        """The folder of a run."""
        return self.root / name

    def start(
        self,
        name: str,
        *sets: str,
        flags: tuple[str, ...] = (),
        sites: Sequence[str] = ("paris", "lyon"),
    ) -> Run:
        """Begin `dilocox train` and return at once."""
        return self.forge.train(self, name, *sets, flags=flags, sites=tuple(sites))

    def train(self, name: str, *sets: str, sites: Sequence[str] = ("paris", "lyon")) -> Run:
        """`dilocox train` to its end, which must be a good one."""
        run = self.start(name, *sets, sites=sites)
        assert run.wait() == 0, run.output()
        assert not list(run.folder.glob("trace*")), "nobody asked for a timeline"
        return run

    def ask(self, *arguments: str) -> Any:
        """The answer, as JSON, of a `dilocox` command that must end well."""
        run = Run([*arguments, "--json"], self.root)
        self.runs.append(run)
        assert run.wait() == 0, run.printed()
        return json.loads(run.printed())


def verdicts(folder: Path, **more: Any) -> dict[str, str]:
    """What `dilocox verify` finds in a run's folder, by claim; those that PASS are left out."""
    from dilocox.record.verify.places import Places
    from dilocox.record.verify.verify import verify

    report = verify(Places(folder, **more), lambda what, share: None)
    return {f.claim.name: f.verdict for f in report.findings if f.verdict != "PASS"}


class Run:
    """One `dilocox` process and the folder that it writes."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.folder = folder
        self._log = folder.parent / f"{folder.name}-{time.monotonic_ns()}.out"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dilocox", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"},
            )

    def output(self) -> str:
        """All that was printed so far, and the ends of the ranks' logs."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        for log in sorted((self.folder / "logs").glob("*.log")):
            text += f"\n--- {log.name}\n{log.read_text(errors='replace')[-1500:]}"
        return text

    def printed(self) -> str:
        """All that was printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def last_line(self) -> str:
        """The last line that was printed so far."""
        return self.printed().strip().splitlines()[-1]

    def wait(self, limit: float = LIMIT) -> int:
        """Exit code; the process is killed and the test fails after `limit` seconds."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"no end after {limit:g} s\n{self.output()}") from None

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        """What batch systems and containers send before they kill."""
        self.process.send_signal(signal.SIGTERM)

    def records(self, kind: str = "round", site: str | None = None) -> list[dict[str, Any]]:
        """Records of metrics.jsonl; rounds of the whole run if `site` is none."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = []
        for line in lines:
            # Tests ask fifty times a second, beside the run that they wait for.
            if f'"kind": "{kind}"' not in line:
                continue
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("kind") == kind and record.get("site") == site:
                found.append(record)
        return found

    def until(self, condition: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait for something that the run writes; fails if the run ends before."""
        deadline = time.monotonic() + limit
        while not condition():
            ended = self.process.poll() is not None
            assert condition() or not ended, f"ended too early\n{self.output()}"
            assert time.monotonic() < deadline, f"not reached in {limit:g} s\n{self.output()}"
            time.sleep(0.02)

    def until_round(self, number: int) -> None:
        """Wait until round `number` (from 0) is recorded."""
        self.until(lambda: any(r["round"] >= number for r in self.records()))

    def until_together(self, sites: int, limit: float) -> None:
        """Wait until a round that is not recorded yet is, by so many sites."""
        last = max(r["round"] for r in self.records())
        self.until(
            lambda: any(r["round"] > last and r["sites"] == sites for r in self.records()), limit
        )

    def sequences_amiss(self) -> tuple[int, int]:
        """Sequences that were trained on twice, and that were left out."""
        summary = self.summary()
        return summary["sequences_doubled"], summary["sequences_missing"]

    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return dict(json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))

    def rank_processes(self) -> dict[str, int]:
        """Process ids of living ranks and sites by name, from the process table."""
        found = {}
        for child in _descendants(self.process.pid):
            name = _name_of(child)
            if name:
                found[name] = child
        return found


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(stat.rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def _name_of(pid: int) -> str:
    """What a child calls itself (`processes.start` sets the command name)."""
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
