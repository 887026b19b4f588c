"""A real Slurm on this machine: munged, slurmctld, and two virtual nodes by slurmd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
NODES = ("n1", "n2")
CORES = 4
"""Cores of a virtual node. Slurm does not hold jobs to them here."""


def needs_slurm() -> None:
    """Skip the test where Slurm is not installed, or the user is not root."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"no Slurm on this machine (Debian: slurmctld slurmd munge): {missing[0]}")
    if os.geteuid() != 0:
        pytest.skip("virtual nodes of Slurm need root")


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


class Cluster:
    """A running Slurm. `environment` is for its commands."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self.root = root
        self.environment = dict(environment)

    def ask(self, *command: str, **more: str) -> str:
        """Run a command of Slurm, and return what it prints."""
        done = subprocess.run(
            command, env={**self.environment, **more}, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **more: str) -> int:
        """Submit a batch script, and return the number of its job."""
        return int(self.ask("sbatch", "--parsable", *arguments, **more))

    def state(self, job: int) -> str:
        """Return the state of a job, such as RUNNING or COMPLETED."""
        shown = self.ask("scontrol", "--oneliner", "show", "job", str(job))
        return shown.partition("JobState=")[2].split()[0]

    def until(self, job: int, states: tuple[str, ...], limit: float = 300.0) -> str:
        """Wait until a job is in one of `states`."""
        end = time.monotonic() + limit
        while (now := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {now}"
            time.sleep(0.5)
        return now

    def cancel_all(self) -> None:
        """End all jobs, and wait until their processes have ended."""
        self.ask("scancel", "--user=root", "--full", "--signal=KILL")
        _until(lambda: self.ask("squeue", "--noheader") == "")


@contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    """Start Slurm in the folder `root`, and end it."""
    for name in ("state", "log", "munge", *(f"spool-{node}" for node in NODES)):
        (root / name).mkdir(parents=True)
    key, meeting = root / "munge" / "key", root / "munge" / "socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for folder in (root, root / "munge"):
        folder.chmod(0o755)
    settings = root / "slurm.conf"
    settings.write_text(_settings(root, meeting), encoding="utf-8")
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(settings)}
    munge = [
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={meeting}",
        f"--pid-file={root}/munge/pid", f"--log-file={root}/munge/log",
        f"--seed-file={root}/munge/seed",
    ]  # fmt: skip
    daemons: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> None:
        with (root / "log" / name).open("wb") as log:
            daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    try:
        start("munged", *munge)
        made = Cluster(root, environment)
        _until(meeting.exists)
        start("slurmctld", "slurmctld", "-D", "-f", str(settings))
        for node in NODES:
            start(node, "slurmd", "-D", "-N", node, "-f", str(settings))
        _until(lambda: _idle(environment) == f"{len(NODES)} idle")
        yield made
        made.cancel_all()
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def _idle(environment: Mapping[str, str]) -> str:
    asked = ["sinfo", "--noheader", "--format", "%D %T"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _until(condition: object, limit: float = 60.0) -> None:
    assert callable(condition)
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "Slurm does not start"
        time.sleep(0.1)


def _settings(root: Path, meeting: Path) -> str:
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for each in (one, two, three):
            each.bind(("127.0.0.1", 0))
        control, *ports = (each.getsockname()[1] for each in (one, two, three))
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CORES}"
        for node, port in zip(NODES, ports, strict=True)
    )
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={meeting}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.txt
SlurmdLogFile={root}/log/slurmd-%n.txt
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
MailProg=/bin/true
{nodes}
PartitionName=main Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""
