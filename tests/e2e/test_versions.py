"""A run with the lowest versions that pyproject.toml allows, by their own interpreter.

`make test` installs them beside the first tests. In an environment of other versions
(`make test-versions`) the run is one with those.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import ARCHITECTURE, LIMIT, RUN, write_corpus

ROOT = Path(__file__).parents[2]
OTHERS = (".venv-lowest", ".venv-highest")
PYTHON = (
    Path(sys.executable)
    if Path(sys.prefix).name in OTHERS
    else ROOT / ".venv-lowest" / "bin" / "python"
)
# A stop takes effect two beats later, which is not to be after the run.
SETS = ("outer.rounds=48", "record.states_every=1", "network.heartbeat=2", "sites.lyon.speed=0.5")

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="the lowest versions are not installed: make test does it"
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_run_is_trained_resumed_verified_and_audited(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    sites = "[sites.paris]\n[sites.lyon]\n"
    text = RUN.format(
        name="run", root=tmp_path, model=ARCHITECTURE, text=write_corpus(tmp_path), sites=sites
    )
    run_file, folder = tmp_path / "run.toml", tmp_path / "run"
    run_file.write_text(text, encoding="utf-8")
    sets = [part for item in SETS for part in ("--set", item)]

    def begin(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [str(PYTHON), "-m", "dilocox", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )
        )
        return started[-1]

    def finish(process: subprocess.Popen[str], code: int) -> str:
        output = process.communicate(timeout=LIMIT)[0]
        assert process.returncode == code, output
        return output

    training = begin("train", str(run_file), *sets)
    metrics, end = folder / "metrics.jsonl", time.monotonic() + LIMIT
    while not (metrics.exists() and '"round": 2' in metrics.read_text(encoding="utf-8")):
        assert training.poll() is None, training.communicate()[0]
        assert time.monotonic() < end, "the run came to no second round"
        time.sleep(0.1)
    training.send_signal(signal.SIGINT)
    assert "--resume goes on" in finish(training, 130)
    finish(begin("train", str(run_file), "--resume", *sets), 0)
    assert "FAIL" not in finish(begin("verify", str(folder)), 0)
    audited = finish(begin("audit", str(folder), "--round", "1"), 0)
    assert audited.count("EXACT") == 2, audited
