"""A run with the lowest versions that pyproject.toml allows, by their own interpreter.

`make test` installs them beside the first tests, trains and verifies. In an environment of other
versions (`make test-versions`) the run is one with those: it is stopped, resumed and audited, too.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.harness import ARCHITECTURE, LIMIT, RUN, write_corpus

ROOT = Path(__file__).parents[2]
THESE = Path(sys.prefix).name in (".venv-lowest", ".venv-highest")
"""The tests themselves run with other versions."""
PYTHON = Path(sys.executable) if THESE else ROOT / ".venv-lowest" / "bin" / "python"
# A stop takes effect two beats later, which is not to be after the run.
STOPPED = (
    "outer.rounds=48", "record.states_every=1", "network.heartbeat=2", "sites.lyon.speed=0.5"
)  # fmt: skip

ONE_AFTER_THE_OTHER = """\
import json, sys
from dilocox.cli.main import main
for words in map(json.loads, sys.argv[1:]):
    try:
        main(words)
    except SystemExit as end:
        if end.code:
            raise
"""
"""Commands of dilocox in one interpreter: the first imports of a new environment take longest."""

pytestmark = [
    pytest.mark.runs,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="the lowest versions are not installed: make test does it"
    ),
]


class Runs:
    """Commands about one run of two sites, in the environment of the other versions."""

    def __init__(self, folder: Path) -> None:
        sites = "[sites.paris]\n[sites.lyon]\n"
        text = RUN.format(
            name="run", root=folder, model=ARCHITECTURE, text=write_corpus(folder), sites=sites
        )
        self.file, self.folder = folder / "run.toml", folder / "run"
        self.file.write_text(text, encoding="utf-8")
        self._started: list[subprocess.Popen[str]] = []

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of dilocox."""
        return self._start("-m", "dilocox", *arguments)

    def begin_all(self, *commands: list[str]) -> subprocess.Popen[str]:
        """Start commands of dilocox that follow each other in one process."""
        return self._start("-c", ONE_AFTER_THE_OTHER, *map(json.dumps, commands))

    def _start(self, *words: str) -> subprocess.Popen[str]:
        self._started.append(
            subprocess.Popen(
                [str(PYTHON), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )
        )
        return self._started[-1]

    def train(self, *more: str, sets: Sequence[str]) -> subprocess.Popen[str]:
        """Start `dilocox train`."""
        return self.begin(*self.training(*more, sets=sets))

    def training(self, *more: str, sets: Sequence[str]) -> list[str]:
        """Arguments of `dilocox train`."""
        given = [part for item in sets for part in ("--set", item)]
        return ["train", str(self.file), *more, *given]

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> str:
        """Wait for a command to end with `code`; what it printed."""
        output = process.communicate(timeout=LIMIT)[0]
        assert process.returncode == code, output
        return output

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    made.end()


@pytest.mark.skipif(THESE, reason="the longer run of these versions is trained, too")
def test_a_run_is_trained_and_verified(runs: Runs) -> None:
    training = runs.training(sets=["outer.rounds=3", "network.heartbeat=20"])
    printed = runs.finish(runs.begin_all(training, ["verify", str(runs.folder)]))
    assert "finished" in printed
    assert "verified: all required claims PASS" in printed
    assert "FAIL" not in printed


@pytest.mark.skipif(not THESE, reason="make test-versions does it, with other versions")
def test_a_run_is_trained_resumed_verified_and_audited(runs: Runs) -> None:
    training = runs.train(sets=STOPPED)
    metrics, end = runs.folder / "metrics.jsonl", time.monotonic() + LIMIT
    while not (metrics.exists() and '"round": 2' in metrics.read_text(encoding="utf-8")):
        assert training.poll() is None, training.communicate()[0]
        assert time.monotonic() < end, "the run came to no second round"
        time.sleep(0.1)
    training.send_signal(signal.SIGINT)
    assert "--resume goes on" in runs.finish(training, 130)
    runs.finish(runs.train("--resume", sets=STOPPED))
    assert "FAIL" not in runs.finish(runs.begin("verify", str(runs.folder)))
    audited = runs.finish(runs.begin("audit", str(runs.folder), "--round", "1"))
    assert audited.count("EXACT") == 2, audited
