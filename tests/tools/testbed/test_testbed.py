"""A lab on this machine: links, changes, quotas, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.lab_needs import needs_lab

from dilocox.tools.testbed import HUB, Lab, LabError, cgroups, link_measurement, registry
from dilocox.tools.testbed.commands import call
from dilocox.tools.testbed.link_spec import parse_rate
from dilocox.tools.testbed.testbed import MOST

pytestmark = pytest.mark.alone

SITES = ["a", "b", "c"]
QUOTA = 0.12
"""Cores per site: so little that others on this machine can hardly take it away."""
SECONDS = 0.5


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with Lab(SITES, "20mbit", quota=QUOTA) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Lab:
    shared.shape("20mbit")
    return shared


@needs_lab
def test_all_that_is_reported_on_is_measured(lab: Lab) -> None:
    lab.set("b-c=3mbit", "a=10mbit/40mbit")
    checked = lab.verify(SECONDS)
    asked = {link.link: link.asked_bits_per_second for link in checked.links}
    assert asked == {
        "a up": 10e6,
        "a down": 40e6,
        **dict.fromkeys(("b up", "b down", "c up", "c down"), 20e6),
        "b to c": 3e6,
        "c to b": 3e6,
    }
    for link in checked.links:
        assert link.bits_per_second == pytest.approx(
            asked[link.link], rel=link_measurement.TOLERANCE
        )
    assert set(checked.round_trips) == {("a", "b"), ("a", "c"), ("b", "c")}
    assert all(0 < seconds < 0.05 for seconds in checked.round_trips.values())
    assert checked.cores.keys() == set(SITES)
    # What is known is not measured again, until links change.
    assert lab.verify(SECONDS) is checked
    lab.set("a=5mbit")
    lab.set("a=10mbit/40mbit")
    assert lab.verify(SECONDS) is not checked


@needs_lab
def test_a_lab_with_a_mis_shaped_link_reports_nothing(lab: Lab) -> None:
    # A bucket behind the lab's back: 6 % more than was asked for.
    switch, port = lab.network.layout.switch, lab.network.layout.port("c")
    call(["tc", "-n", switch, "qdisc", "replace", "dev", port, "root", "tbf", "rate", "21200kbit",
          "burst", "25000", "limit", "270000"])  # fmt: skip
    with pytest.raises(LabError, match=r"link c down: 20 Mbit/s requested, but 21\.\d+ Mbit/s"):
        lab.verify(SECONDS)
    lab.shape()  # the bucket goes, whoever made it


@needs_lab
def test_links_that_change_while_they_are_measured_are_measured_as_they_are_then(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dilocox lab set` in that second is no busy machine, and must not end the run."""
    measure_all, tries = link_measurement.measure_all, []

    def changed(*arguments: Any) -> list[Any]:
        tries.append(arguments)
        if len(tries) == 1:
            lab.set("a=5mbit")
            raise LabError("link a up: 20 Mbit/s requested, but 5 Mbit/s measured")
        return measure_all(*arguments)

    monkeypatch.setattr(link_measurement, "measure_all", changed)
    checked = lab.verify(SECONDS)
    assert len(tries) == 2
    assert checked.links[0].asked_bits_per_second == 5e6
    monkeypatch.setattr(link_measurement, "measure_all", lambda *_: next(iter(())))
    assert lab.verify(SECONDS) is checked


def _flow(lab: Lab, source: str, target: str) -> Callable[[], float]:
    """Bits per second that `target` receives, over half a second from a moment after a call."""

    def rate() -> float:
        time.sleep(0.25)  # what waits in the queue at the old rate
        begin, first = link_measurement.reading(lab.network)
        time.sleep(SECONDS)
        end, last = link_measurement.reading(lab.network)
        return last[target].since(first[target]).received_bytes * 8 / (end - begin)

    return rate


@needs_lab
def test_links_change_while_packets_flow(lab: Lab) -> None:
    """Also by another process, from a line to a pair and back, and without losing the flow."""
    said = subprocess.PIPE
    python = [sys.executable, "-I", "-c", link_measurement._SEND, lab.address("b"), str(60e6)]
    sender = lab.start("a", python, stdout=said)
    assert sender.stdout is not None
    sender.stdout.readline()
    rate = _flow(lab, "a", "b")
    assert rate() == pytest.approx(20e6, rel=0.05)
    for setting, expected in (("a=5mbit", 5e6), ("a-b=2mbit", 2e6), ("a-b=1mbit", 1e6)):
        lab.set(setting)
        assert rate() == pytest.approx(expected, rel=0.05), setting
    command = [sys.executable, "-m", "dilocox", "lab", "set", "--lab", str(os.getpid())]
    printed = call([*command, "--all", "8mbit", "a-b=none"])
    assert rate() == pytest.approx(8e6, rel=0.05)
    assert printed.splitlines() == [f"{site:<18}8 Mbit/s" for site in SITES]
    assert [what for _, what in lab.changes][-2:] == ["a-b=1mbit", "every site 8mbit a-b=none"]
    assert lab.links.line("c").up == parse_rate("8mbit")
    lab.shape()
    assert not lab.links.shaped
    assert rate() == pytest.approx(60e6, rel=0.1)  # as much as is sent
    sender.kill()
    sender.communicate()


@needs_lab
def test_quotas_hold(lab: Lab) -> None:
    # Others on this machine may take something away once; nobody may ever get more.
    for _ in range(4):
        shares = lab.cpu_shares(0.8)
        assert all(share <= 1.1 * QUOTA for share in shares.values()), shares
        if all(share >= 0.9 * QUOTA for share in shares.values()):
            break
    else:
        pytest.fail(f"{shares} of {QUOTA} cores each")
    # More processes do not get more.
    spin = [sys.executable, "-I", "-c", "while True: pass"]
    others = [lab.start("a", spin) for _ in range(2)]
    try:
        assert lab.cpu_shares(0.4)["a"] < 0.6 * QUOTA
    finally:
        for other in others:
            other.kill()
            other.wait()


@needs_lab
def test_what_runs_at_a_site_is_there_and_below_its_quota(lab: Lab) -> None:
    script = "cat /proc/self/cgroup; cat /proc/net/fib_trie"
    done = lab.start("b", ["sh", "-c", script], stdout=subprocess.PIPE)
    printed = done.communicate()[0]
    assert f"/{lab.network.layout.stem}at-b" in printed
    assert lab.address("b") in printed
    answers = [lab.fork(host, _ends_with_address, lab.address(host), name=host)
               for host in ("c", HUB)]  # fmt: skip
    for answer in answers:
        answer.join()
        assert answer.exitcode == 0


def _ends_with_address(address: str) -> None:
    sys.exit(0 if address in Path("/proc/net/fib_trie").read_text() else 1)


@needs_lab
def test_a_process_has_one_lab(lab: Lab) -> None:
    with pytest.raises(LabError, match="has a lab already; leave it first"):
        Lab(["d"], quota=QUOTA).__enter__()
    assert lab.counters().keys() == {*SITES, HUB}


def test_quotas_above_nine_tenths_of_the_machine_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    assert Lab(SITES).quota == pytest.approx(MOST * cores / 3)
    assert Lab(SITES, quota=MOST * cores / 3).quota == MOST * cores / 3
    with pytest.raises(LabError, match=r"3 sites may have \S+ each, 90% of the machine's"):
        Lab(SITES, quota=0.92 * cores / 3)
    with pytest.raises(LabError, match=r"below 0\.05 nothing can be measured"):
        Lab(SITES, quota=0.01)


def test_where_no_lab_can_be_made_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"a lab cannot be made here: .* need") as said:
        Lab(SITES).__enter__()
    assert "\n" not in str(said.value)


# --- nothing stays ---------------------------------------------------------------------------

SCRIPT = """\
import signal, time
from dilocox.tools.testbed import Lab
with Lab(["a", "b"], "5mbit", quota=0.1, delay={delay}) as lab:
    started = [lab.start("a", ["sleep", "600"]), lab.fork("b", time.sleep, 600, name="x")]
    extra = [lab.delay._process.pid] if lab.delay else []
    print(lab._guard.pid, *(p.pid for p in started), *extra, flush=True)
    signal.pause()
"""


def _start(delay: float = 0.0) -> tuple[subprocess.Popen[str], int, list[int]]:
    """A process with a lab; process numbers of its guard, and of all else that it has started."""
    script = SCRIPT.format(delay=delay)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert len(line) > 2, process.communicate()
    return process, int(line[0]), [int(word) for word in line[1:]]


def _left(owner: int, started: list[int]) -> list[str]:
    names = [entry.name for entry in Path("/run/netns").iterdir()]
    names += [str(group) for group in cgroups.all_groups()]
    found = [name for name in names if f"dilocox-{owner}-" in name]
    found += [f"lab {n}" for n in registry.owners() if n == owner]
    return found + [f"process {number}" for number in started if _runs(number)]


def _runs(number: int) -> bool:
    try:
        return Path("/proc", str(number), "stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until_gone(owner: int, started: list[int]) -> None:
    deadline = time.monotonic() + 20
    while _left(owner, started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _left(owner, started) == []


@needs_lab
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_nothing_stays_after_a_signal(number: signal.Signals) -> None:
    process, guard, started = _start(delay=0.01)
    assert len(_left(process.pid, started)) == 4 + 3 + 1 + 3
    process.send_signal(number)
    assert process.wait(timeout=20) == -number
    if number == signal.SIGINT:
        # Its own doing: it is over when the process is.
        assert _left(process.pid, started) == []
    _until_gone(process.pid, [guard, *started])


@needs_lab
def test_what_stays_without_a_guard_is_removed_by_lab_clean() -> None:
    process, guard, started = _start()
    os.kill(guard, signal.SIGKILL)
    process.kill()
    process.wait(timeout=20)
    assert len(_left(process.pid, [])) == 4 + 3 + 1
    assert _runs(started[0])
    printed = call([sys.executable, "-m", "dilocox", "lab", "clean"])
    assert f"removed dilocox-{process.pid}-at-a\n" in printed
    _until_gone(process.pid, started)


def test_sites_may_have_quotas_of_their_own() -> None:
    cores = len(os.sched_getaffinity(0))
    mixed = Lab(SITES, quota=0.1, quotas={SITES[0]: 0.2})
    assert mixed.quotas == {site: 0.2 if site == SITES[0] else 0.1 for site in SITES}
    assert mixed.quota == 0.1
    with pytest.raises(LabError, match="of the machine's"):
        Lab(SITES, quota=MOST * cores / 3, quotas={SITES[0]: MOST * cores / 2})
    with pytest.raises(LabError, match="nothing can be measured"):
        Lab(SITES, quotas=dict.fromkeys(SITES, 0.01))
