"""`dilocox lab` as a user runs it: real sites on measured links.

What interfaces count may exceed the payloads by as much as `test_wire_bytes` allows: headers, an
acknowledgement per segment at most, and what sites say to each other beside payloads.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dilocox.tools.testbed import cgroups
from dilocox.tools.testbed.testbed import unsupported_reason
from tests.e2e.test_wire_bytes import FIXED_PER_PEER, HEADERS
from tests.support.harness import LIMIT, Run, Workshop

REASON = unsupported_reason()
pytestmark = [pytest.mark.alone, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
SETS = ("site.stages=1", "checkpoint.every_rounds=0", "outer.rounds=4")


def start(workshop: Workshop, name: str, *words: str, sets: tuple[str, ...] = SETS) -> Run:
    """Begin `dilocox lab`; its run's folder is `<name>-lab`."""
    arguments = workshop.run_file(name, *sets)
    run = Run(["lab", *arguments, *words], workshop.root / f"{name}-lab")
    workshop.runs.append(run)
    return run


def figures(run: Run) -> dict[str, Any]:
    """What `--json` wrote."""
    file = run.folder.parent / "figures.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def test_a_run_on_measured_links_reports_payload_and_wire(workshop: Workshop) -> None:
    file = str(workshop.root / "figures.json")
    words = ["--link", "20mbit", "--links", "paris-lyon=8mbit", "--json", file]
    arguments = workshop.run_file("measured", *SETS)
    run = workshop.forge.command(workshop, "measured-lab", "lab", *arguments, *words)
    assert run.wait() == 0, run.output()
    found, printed = figures(run), run.printed()
    assert found["sites"].keys() == {"paris", "lyon"}
    assert [link["link"] for link in found["links"]] == [
        *("paris up", "paris down", "lyon up", "lyon down", "lyon to paris", "paris to lyon"),
    ]
    assert all(abs(link["off_by"]) <= 0.05 for link in found["links"])
    payload, wire = found["payload_bytes"], found["exchange_wire_bytes"]
    detail = f"payloads {payload}, exchange on the wire {wire}"
    assert payload == run.summary()["payload_bytes"] > 0
    assert wire >= payload * (1 + HEADERS), detail
    assert wire <= payload * (1 + 2 * HEADERS) + 2 * FIXED_PER_PEER, detail
    for site in found["sites"].values():
        assert site["wire_sent_bytes"] > site["payload_bytes"]
        assert site["wire_per_round"] > site["payload_per_round"] > 0
    assert found["rounds_measured"] == [3, 4]
    assert found["tokens_per_second"] > 0
    assert 0 < found["round_trip_seconds"]["paris-lyon"] < 0.05
    # Both kinds of bytes, and the round trip beside the speed.
    assert re.search(r"speed .* tokens/s over rounds 2 to 3 .*round trip \d+\.\d\d ms", printed)
    assert re.search(r"between sites +\S+ kB of payload, \S+ kB on the wire, \S+% more", printed)
    assert re.search(r"paris to lyon +8 Mbit/s", printed)


@pytest.mark.slow
def test_links_that_were_changed_are_measured_again(workshop: Workshop) -> None:
    """With delay, more sites than the file names, and every site by itself for comparison."""
    file = str(workshop.root / "figures.json")
    words = ["--link", "6mbit", "--sites", "3", "--delay", "5ms", "--alone", "--json", file]
    run = start(workshop, "changed", *words, sets=(*SETS, "outer.rounds=40"))
    run.until_round(3)
    command = [sys.executable, "-m", "dilocox", "lab", "set", "--lab", str(run.process.pid)]
    subprocess.run([*command, "paris-site3=2mbit"], check=True, capture_output=True)
    assert run.wait() == 0, run.output()
    found = figures(run)
    assert found["sites"].keys() == {"paris", "lyon", "site3"}
    assert len(found["links"]) == 8
    assert [what.split(": ")[1] for what in found["link_changes"]] == ["paris-site3=2mbit"]
    assert all(0.01 <= trip < 0.015 for trip in found["round_trip_seconds"].values())
    assert found["alone_tokens_per_second"] > 0
    assert "links changed" in run.printed()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_of_a_run_that_is_ended(workshop: Workshop, number: signal.Signals) -> None:
    sets = (*SETS, "outer.rounds=200")
    run = start(workshop, f"ended-{number}", "--link", "20mbit", sets=sets)
    run.until_round(1)
    owner = run.process.pid
    started = list(run.rank_processes().values())
    assert len(started) >= 5  # coordinator, sites, ranks
    assert len(left(owner, started)) == len(started) + 4 + 3
    os.kill(owner, number)
    assert run.wait() == (130 if number == signal.SIGINT else -number), run.output()
    deadline = time.monotonic() + LIMIT
    while left(owner, started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left(owner, started) == []
    if number == signal.SIGINT:
        assert run.printed().splitlines()[-1] == "dilocox: interrupted"


def left(owner: int, started: list[int]) -> list[str]:
    """Namespaces, control groups and processes of a lab that are still there."""
    names = [entry.name for entry in Path("/run/netns").iterdir()]
    names += [group.name for group in cgroups.all_groups()]
    alive = [str(number) for number in started if Path("/proc", str(number), "exe").exists()]
    return [name for name in names if name.startswith(f"dilocox-{owner}-")] + alive
