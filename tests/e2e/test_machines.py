"""A site of two machines by deploy/container/site.sh, as in the Helm chart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.test_network import start_coordinator
from tests.e2e.test_slurm import LONG, written_run_file
from tests.support.harness import Run, Workshop

pytestmark = [pytest.mark.slow, pytest.mark.stops]
SCRIPT = Path(__file__).parents[2] / "deploy" / "container" / "site.sh"


class Machines:
    """The machines of the sites of a run: one of paris, and two of lyon with one rank each."""

    def __init__(self, workshop: Workshop, name: str, *sets: str) -> None:
        self.coordinator, self.lines = start_coordinator(workshop, name, *sets)
        self.run_file = written_run_file(workshop, name, sets)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = str(found.getsockname()[1])
        self.every: list[subprocess.Popen[bytes]] = []
        self.paris = self._start("paris")
        self.start_lyon()

    def start_lyon(self) -> None:
        """Start the two machines of lyon, as a Job of Kubernetes starts its pods."""
        self.lyon = [
            self._start("lyon", NODES="2", NODE=str(node), RANKS="1", MASTER_ADDR="127.0.0.1")
            for node in (0, 1)
        ]

    def _start(self, site: str, **variables: str) -> subprocess.Popen[bytes]:
        address, token = self.lines[site].split()[1], self.lines[site].split()[-1]
        words = [address, site, str(self.run_file), token]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        log = self.log(site, variables.get("NODE", "0"))
        with log.open("wb") as file:
            started = subprocess.Popen(
                [SCRIPT, *words], stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path, "MASTER_PORT": self.port, **variables},
            )  # fmt: skip
        self.every.append(started)
        return started

    def log(self, site: str, node: str) -> Path:
        """The file of what a machine prints."""
        return self.run_file.with_name(f"{self.run_file.stem}-{site}-{node}.log")

    def said(self, site: str, node: int = 0) -> str:
        """What a machine has printed."""
        return self.log(site, str(node)).read_text(encoding="utf-8", errors="replace")

    def rank_of(self, machine: subprocess.Popen[bytes]) -> int:
        """The process of the one rank of a machine."""
        children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
        return int(children[0])


@contextmanager
def machines(workshop: Workshop, name: str, *sets: str) -> Iterator[Machines]:
    found = Machines(workshop, name, *sets)
    try:
        yield found
    finally:
        for each in found.every:
            if each.poll() is None:
                each.kill()
                each.wait()


def entered(run: Run) -> int:
    return run.printed().count("lyon contributes from round")


def test_a_killed_rank_comes_back_and_machines_that_must_end_leave(workshop: Workshop) -> None:
    with machines(workshop, "machines", *LONG, "outer.rounds=5000") as made:
        run = made.coordinator
        run.until_round(3)
        os.kill(made.rank_of(made.lyon[1]), signal.SIGKILL)
        run.until(lambda: all("starts again in 10 s" in made.said("lyon", n) for n in (0, 1)))
        run.until(lambda: entered(run) == 2, 400)
        # The cluster takes back one machine of lyon: both end after their rounds, and come back.
        made.lyon[1].send_signal(signal.SIGTERM)
        assert [each.wait(240) for each in made.lyon] == [143, 143], made.said("lyon")
        assert "site lyon was told to end on another machine" in made.said("lyon", 0)
        assert "site lyon was told to end here" in made.said("lyon", 1)
        made.start_lyon()
        run.until(lambda: entered(run) == 3, 400)
        # The cluster takes both machines back.
        for each in made.lyon:
            each.send_signal(signal.SIGTERM)
        assert [each.wait(240) for each in made.lyon] == [143, 143], made.said("lyon")
        assert "site lyon was told to end here" in made.said("lyon", 1)
        run.interrupt()
        assert run.wait() == 130
        # The run was stopped, which is no crash: nothing starts again.
        assert made.paris.wait(240) == 0
