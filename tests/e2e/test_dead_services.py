"""A chain's server, a witness, a storage or an agent that fails holds up no round.

The service is dead, hangs or lies from the first round to the last. What each command does then,
and when the service is back, is in the tests that `docs/notes/outside-services.md` names.

All sites train on one core, and the command that talks with the service runs on another core. A
site with GPUs has cores to spare, too. So what training loses is not the command's own computing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("web3")

from dilocox.record.log.signed_note import WitnessKey
from dilocox.tools.settlement import keystore
from dilocox.tools.settlement.run_on_chain import RunOnChain
from tests.support.harness import PATIENT, Run, Workshop
from tests.support.nonsense_server import nonsense

pytestmark = [pytest.mark.slow, pytest.mark.alone]
SIZE = ("outer.rounds=8", "outer.inner_steps=20", "site.stages=1", "checkpoint.every_rounds=0",
        "evaluation.every_rounds=0", PATIENT)  # fmt: skip
LEAST = 0.2
"""Least share of the tokens per second. Rounds that waited for the chain would leave a hundredth.

Equal runs differ by more than twice on a machine that computes other things, too. What is printed
says more on a quiet machine.
"""
CORES = sorted(os.sched_getaffinity(0))
TRAINING, COMMANDS = CORES[0], CORES[-1]
WITNESS = str(WitnessKey("dead.example/1", bytes(range(32))))
KINDS = (
    "chain dead", "chain hanging", "chain lying", "witness dead", "witness hanging",
    "witness lying", "storage dead", "storage hanging", "storage lying", "agent hanging",
)  # fmt: skip
TOLD = {"chain": "record.anchor: ", "witness": "record.anchor: ", "storage": "dilocox: ",
        "agent": "not filed"}  # fmt: skip


@contextlib.contextmanager
def server(fault: str) -> Iterator[str]:
    """URL of a server that refuses connections, takes them and never answers, or lies."""
    if fault == "lying":
        with nonsense() as port:
            yield f"http://127.0.0.1:{port}"
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        if fault == "hanging":
            found.listen(100)
        yield f"http://127.0.0.1:{found.getsockname()[1]}"


@contextlib.contextmanager
def agent() -> Iterator[str]:
    """Socket of an agent of attestation that takes connections and never answers."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as found:
        found.bind(f"{folder}/agent")
        found.listen(100)
        yield f"{folder}/agent"


def anchoring(keys: Path, folder: Path) -> list[str]:
    """The hook that anchors a run's log on its chain."""
    keys.mkdir()
    keystore.create_key(keys / "own.key", "geheim", rounds=2)
    (keys / "password").write_text("geheim")
    (keys / "password").chmod(0o600)
    return ["chain", "anchor", str(folder), "--key", str(keys / "own.key"), "--password-file",
            str(keys / "password")]  # fmt: skip


def apart() -> list[str]:
    """The interpreter of a command that runs beside training."""
    return ["taskset", "--cpu-list", str(COMMANDS), sys.executable]


def beside(service: str, folder: Path, place: str) -> list[str]:
    """The command that runs beside the run, with a service that fails."""
    if service == "storage":
        return ["publish", str(folder), "--to", "s3://bucket/run"]
    return ["attest", str(folder), "--site", "paris", "--dstack", place, "--follow"]


@dataclass
class Trained:
    """A run that has ended, and what was said on the service."""

    run: Run
    told: int
    """Lines."""


def trained(workshop: Workshop, kind: str, number: int) -> Trained:
    """A run beside such a service, to its end."""
    name = f"beside-{kind.replace(' ', '-')}-{number}"
    service, _, fault = kind.partition(" ")
    folder, sets, other = workshop.folder(name), list(SIZE), None
    with agent() if service == "agent" else server(fault) as place:
        command = {
            "chain": lambda: anchoring(workshop.root / f"keys-{name}", folder),
            "witness": lambda: ["witness", "ask", str(folder), "--witness", WITNESS, place],
        }.get(service)  # fmt: skip
        if command is not None:
            hook = [*apart(), "-m", "dilocox", *command()]
            sets.append(f"record.anchor={json.dumps(hook)}")
        run = workshop.start(name, *sets)
        # Before it starts the coordinator and the ranks, which inherit it.
        os.sched_setaffinity(run.process.pid, {TRAINING})
        run.until(lambda: (folder / "record" / "log.pub").exists())
        address = "0x" + "22" * 20
        if service == "chain":
            RunOnChain(place, 7, address, address, "33" * 32, 0, (address,)).write(folder)
        if service in ("storage", "agent"):
            run.until(lambda: (folder / "private" / "paris.key").exists())
            other = subprocess.Popen(
                [*apart(), "-m", "dilocox", *beside(service, folder, place)],
                env={**os.environ, "AWS_ENDPOINT_URL": place, "AWS_ACCESS_KEY_ID": "a",
                     "AWS_SECRET_ACCESS_KEY": "b", "AWS_MAX_ATTEMPTS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        try:
            assert run.wait() == 0, run.output()
        finally:
            if other is not None:
                other.terminate()
    said = run.printed() if other is None else other.communicate()[0]
    return Trained(run, said.count(TOLD.get(service, "\0")))


def speed(run: Run) -> float:
    """Median of the tokens per second of the rounds; the first one has the set-up."""
    return statistics.median(each["tokens_per_second"] for each in run.records()[1:])


def test_training_is_as_fast_beside_services_that_fail(workshop: Workshop) -> None:
    """Each run is compared with the mean of the undisturbed runs before and after it."""
    turns = [turn for kind in KINDS for turn in ("none", kind)] + ["none"]
    found: list[float] = []
    for number, kind in enumerate(turns):
        each = trained(workshop, kind, number)
        found.append(speed(each.run))
        # The run may end before a command beside it has tried a second time.
        least = kind.startswith(("chain", "witness"))
        assert least <= each.told <= (kind != "none"), (kind, each.run.printed())
    shares = {
        kind: 2.0 * found[number] / (found[number - 1] + found[number + 1])
        for number, kind in enumerate(turns)
        if kind != "none"
    }
    calm = found[::2]
    print(f"tokens/s: {found}; shares of the runs around: {shares}")
    print(f"undisturbed runs: {min(calm) / max(calm):.2f} of the fastest and more")
    assert all(share > LEAST for share in shares.values()), shares
