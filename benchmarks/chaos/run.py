"""A run of several sites in network namespaces, with methods to inject faults.

`dilocox coordinator` runs on `hub`, and `dilocox join` at every site, as users start them. One
site's run folder is a small separate file system, so that its disk can be filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.tiny_run import tiny_run
from dilocox.config.run_config import load_run
from dilocox.tools.testbed import Network
from dilocox.tools.testbed.commands import ip

HUB = "hub"
SITES = ("paris", "lyon", "oslo")
SMALL_DISK = "oslo"
DISK_MIB = 48
RATE = 20e6
"""Bits per second of every site's line."""
HEARTBEAT = 2.5
LIMIT = 120.0
"""Seconds after which a condition that was not reached counts as a hang."""
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "999"}
Record = dict[str, Any]


class HangError(Exception):
    """A condition that a run must reach was not reached in time."""


def run_file(root: Path, name: str, rounds: int) -> Path:
    """Write a run file and return its path."""
    content = tiny_run(root, rounds)
    content["data"]["validation_sequences"] = 64
    content["site"]["stages"] = 2
    content["outer"]["min_sites"] = 1
    content |= {
        "run": {"name": name, "folder": str(root / HUB / "{name}")},
        "checkpoint": {"every_rounds": 8},
        "network": {"link_timeout": 30.0, "heartbeat": HEARTBEAT},
        "sites": {site: {} for site in SITES},
    }
    return common.write_run_file(root, name, content)


def tree(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes. Processes that have ended are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount an empty file system of `DISK_MIB` MiB at `folder` for the duration of the context."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "dilocox-chaos", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Run:
    """A run that goes on."""

    def __init__(self, network: Network, root: Path, name: str, rounds: int) -> None:
        self.network, self.root, self.rounds = network, root, rounds
        self.file = run_file(root, name, rounds)
        self._host = f"network.host={network.address(HUB)}"
        self.config = load_run(self.file, [self._host])
        self.log = root / f"{name}.log"
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._seen: list[Record] = []
        self._read = 0
        self.start_coordinator()
        found = self.until(lambda: re.search(r"dilocox join (\S+) ", self.said()), "its join lines")
        self.address: str = found[1]
        self.prepared()
        for site in SITES:
            self.join(site)

    def prepared(self) -> None:
        """Called when the coordinator listens, before the sites join."""

    def start_coordinator(self) -> None:
        """Start `dilocox coordinator`. The command is the same for a new and a resumed run."""
        self._start(HUB, "coordinator", str(self.file), "--set", self._host)

    def join(self, site: str) -> None:
        """Start `dilocox join` at a site."""
        token = self.config.folder / "coordinator" / "tokens" / site
        place = f"run.folder={self.folder(site)}/{{name}}"
        self._start(
            site, "join", self.address, "--site", site, "--run-file", str(self.file),
            "--token-file", str(token), "--set", self._host, "--set", place,
        )  # fmt: skip

    def folder(self, site: str) -> Path:
        """Return the folder of a site's run folders."""
        return self.root / site

    def _start(self, host: str, *arguments: str) -> None:
        with self.log.open("a") as log:
            self._processes[host] = self.network.start(
                host,
                [sys.executable, "-m", "dilocox", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )

    def said(self) -> str:
        """Return the output of coordinator and sites so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def records(self) -> list[Record]:
        """Return the records of metrics.jsonl so far."""
        path = self.config.folder / "metrics.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as file:
                file.seek(self._read)
                while (line := file.readline()).endswith("\n"):
                    self._seen.append(json.loads(line))
                    self._read = file.tell()
        return self._seen

    def reported(self, site: str) -> list[Record]:
        """Return the records of a site's rounds."""
        return [r for r in self.records() if r["kind"] == "round" and r.get("site") == site]

    def last_round(self) -> int:
        """Return the highest round that a site has reported; -1 before the first."""
        rows = [record for site in SITES for record in self.reported(site)[-1:]]
        return max((row["round"] for row in rows), default=-1)

    @property
    def over(self) -> bool:
        """Return whether the coordinator has ended the run."""
        return (self.config.folder / "summary.json").exists()

    def until(self, ready: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        """Wait until `ready` returns a true value, and return the value.

        Raises `HangError` after `limit` seconds. `what` describes the condition.
        """
        deadline = time.monotonic() + limit
        while not (found := ready()):
            if time.monotonic() > deadline:
                raise HangError(f"no {what} after {limit:g} s\n{self.said()[-3000:]}")
            time.sleep(0.05)
        return found

    def ranks(self, site: str) -> dict[str, int]:
        """Return the process ids of a site's living ranks, by name."""
        found = {}
        for pid in tree(self._processes[site].pid):
            with contextlib.suppress(OSError):
                name = (Path("/proc") / str(pid) / "comm").read_text().strip()
                if name.startswith(f"{site}:"):
                    found[name] = pid
        return found

    def kill(self, host: str) -> None:
        """Kill all processes of a host, as a power cut does."""
        kill(tree(self._processes[host].pid))
        self._processes[host].wait()

    def cut(self, site: str, down: bool) -> None:
        """Take the line of a site down, or up again."""
        layout = self.network.layout
        state = "down" if down else "up"
        ip("-n", layout.switch, "link", "set", layout.port(site), state)

    def finish(self) -> Record:
        """Wait for the end of all processes, and return the summary.

        Raises `HangError` if no new record appears for `LIMIT` seconds.
        """
        for host, process in self._processes.items():
            known = -1
            while process.poll() is None:
                known, before = len(self.records()), known
                if known == before:
                    raise HangError(f"no end of {host}, and no round for {LIMIT:g} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LIMIT)
        summary: Record = json.loads((self.config.folder / "summary.json").read_text())
        return summary

    def ledger(self) -> list[Record]:
        """Return the ledger: the token ranges that each site was given."""
        found = json.loads((self.config.folder / "ledger.json").read_text(encoding="utf-8"))
        entries: list[Record] = found["entries"]
        return entries

    def close(self) -> None:
        """End all processes that still run."""
        for process in self._processes.values():
            kill(tree(process.pid))
            process.wait()
