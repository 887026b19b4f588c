"""A standby takes over from a coordinator that was killed: real processes, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
from pathlib import Path

import pytest

from tests.e2e.test_operations import coordinate, flush_digests, join_lines, recorded_once
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import Workshop

pytestmark = [pytest.mark.stops, pytest.mark.slow]
SMALL = ("outer.rounds=14", "checkpoint.every_rounds=0", "site.stages=1", "network.heartbeat=6")
KEYS = ("authority.pem", "server.pem", "operator.json", "token-secret", "record-key")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def copy_keys(first: Path, second: Path) -> None:
    """What the operator copies to the standby's machine."""
    (second / "coordinator").mkdir(parents=True, mode=0o700)
    for name in KEYS:
        shutil.copy2(first / "coordinator" / name, second / "coordinator" / name)


def events(folder: Path) -> list[tuple[object, ...]]:
    log = sqlite3.connect(f"file:{folder}/coordinator/coordinator.sqlite?mode=ro", uri=True)
    return log.execute("SELECT number, time, kind, data FROM events ORDER BY number").fetchall()


@pytest.mark.parametrize("killed", [True, False])
def test_a_standby_goes_on_where_the_first_coordinator_was(
    workshop: Workshop, forge: Forge, killed: bool
) -> None:
    """The first was killed; or the operator moves a run whose coordinator is well."""
    ports, one, two = (free_port(), free_port()), f"first-{killed}", f"second-{killed}"
    places = workshop.root / one, workshop.root / two
    words = workshop.run_file(one, *SMALL, f"network.port={ports[0]}", "run.name=shared")
    words += ["--set", f"run.folder={places[0]}"]
    first = coordinate(forge, workshop, one, *words)
    standby_words = [*words, "--set", f"run.folder={places[1]}",
                     "--set", f"network.port={ports[1]}"]  # fmt: skip
    addresses = [f"127.0.0.1:{port}" for port in ports]
    copy_keys(places[0], places[1])
    standby = forge.command(
        workshop, two, "coordinator", *standby_words, "--standby-of", addresses[0]
    )
    standby.until(lambda: "standby: follows" in standby.printed())
    sites: dict[str, ForkedRun] = {}
    for site, line in join_lines(first).items():
        line[line.index(addresses[0])] = ",".join(addresses)
        sites[site] = forge.command(workshop, one, *line)
    first.until(lambda: "a standby is in step" in first.printed())
    first.until_round(2)
    # While the first answers, nobody takes over by mistake; nor is the folder a coordinator's.
    wrong = forge.command(workshop, two, "coordinator", *standby_words)
    assert wrong.wait() == 1
    assert "is the folder of a standby" in wrong.printed()
    if killed:
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.wait(10.0) == -signal.SIGKILL
        standby.until(lambda: "run it with --take-over --gone" in standby.printed())
    standby.interrupt()
    standby.wait()
    flags = ["--take-over"]
    if killed:
        early = forge.command(workshop, two, "coordinator", *standby_words, *flags)
        assert early.wait() == 1
        assert "add --gone" in early.printed()
        flags.append("--gone")
    second = coordinate(forge, workshop, two, *standby_words, *flags)
    # The first comes back, as a service manager would start it: it is ended at once.
    back = forge.command(workshop, one, "coordinator", *words) if killed else first
    assert back.wait() == 1
    assert "a standby has taken over this run (generation 2)" in back.printed()
    # All that any site was told was on the standby's disk.
    begun = json.loads((places[1] / "coordinator/generations.json").read_text())["begun"]
    before, copied = events(places[0]), events(places[1])
    assert copied[: begun[1]] == before[: begun[1]]
    assert killed or len(before) == begun[1]
    again = forge.command(workshop, one, "coordinator", *words)
    assert again.wait() == 1
    assert "a standby has taken over this run, so this log is out of date" in again.printed()
    assert [site.wait() for site in sites.values()] == [0, 0], sites["lyon"].output()
    assert second.wait() == 0, second.output()
    summary = second.summary()
    assert summary["rounds"] == 14
    assert (summary["sequences_doubled"], summary["sequences_missing"]) == (0, 0)
    assert recorded_once(second, "paris", "lyon") == list(range(14))
    assert len(flush_digests(second)) == 1
    kinds = [str(row[2]) for row in events(places[1])]
    assert kinds.count("Enrolled") == 2, "nobody had to come back"
    assert not {"Gone", "Resumed"} & set(kinds)
    verified = forge.command(
        workshop, two, "verify", str(places[1]),
        "--store", str(places[0] / "record" / "store"),
        "--model", str(places[0] / "model"),
    )  # fmt: skip
    assert verified.wait() == 0, verified.printed()
