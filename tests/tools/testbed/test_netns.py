"""Networks on one machine: rates, refusal, counters, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.lab_needs import needs_network

from dilocox.tools.testbed import Counters, LabError, Network, link_measurement, netns, verify_links
from dilocox.tools.testbed.commands import call
from dilocox.tools.testbed.netns import unsupported_reason

pytestmark = pytest.mark.alone

MEGABIT = 1e6


def made() -> list[str]:
    folder = Path("/run/netns")
    stem = f"dilocox-{os.getpid()}-"
    return [e.name for e in folder.iterdir() if e.name.startswith(stem)] if folder.exists() else []


@needs_network
def test_a_shaped_link_has_its_rate_both_ways_and_counters_see_it() -> None:
    with Network(["a", "b"]) as network:
        network.shape({"a": 20 * MEGABIT, "b": 20 * MEGABIT})
        before = network.counters("a")
        assert before == Counters(0, 0, 0, 0, 0)  # not a frame that nobody asked for
        links = verify_links(network, seconds=0.4)
        counted = network.counters("a").since(before)
    assert [link.link for link in links] == ["a up", "a down", "b up", "b down"]
    assert all(abs(link.off_by) <= link_measurement.TOLERANCE for link in links)
    # What a sent was measured for half a second at least at 2.5 MB/s; no packet is too large.
    assert counted.sent_bytes > 0.4 * 2.5e6
    assert counted.received_bytes / counted.received_packets <= netns.FRAME_BYTES


@needs_network
def test_a_line_that_no_other_host_can_fill_is_refused() -> None:
    with Network(["a", "b"]) as network:
        network.shape({"a": 40 * MEGABIT, "b": 10 * MEGABIT})
        with pytest.raises(LabError, match="a down: cannot be measured, every other host is slow"):
            verify_links(network)


@needs_network
def test_a_mis_shaped_link_is_refused() -> None:
    with Network(["a", "b", "c"]) as network:
        network.shape({"a": 20 * MEGABIT, "b": 20 * MEGABIT})
        # One bucket is filled 6 % faster than was asked for.
        call(["tc", "-n", network.namespace("b"), "qdisc", "replace", "dev", "eth0", "root", "tbf",
              "rate", "21200kbit", "burst", "25000", "limit", "270000"])  # fmt: skip
        with pytest.raises(LabError, match=r"link b up: 20 Mbit/s .* \(\+[56]\.\d%\); the machine"):
            verify_links(network, seconds=0.5)


@needs_network
def test_without_a_rate_there_is_nothing_to_measure() -> None:
    with Network(["a", "b"]) as network, pytest.raises(LabError, match="no link is shaped"):
        verify_links(network)


@needs_network
def test_everything_goes_also_after_an_error_and_with_what_still_runs() -> None:
    started: list[subprocess.Popen[str]] = []

    def fail() -> None:
        with Network(["a"]) as network:
            started.append(network.start("a", ["sleep", "600"]))
            network.run("a", ["true"])
            assert made()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert started[0].wait(5.0) == -9
    assert made() == []


@needs_network
def test_what_a_killed_process_left_is_removed_by_the_next_one() -> None:
    script = (
        "import os, signal\nfrom dilocox.tools.testbed import Network\n"
        "Network(['a']).__enter__()\nprint(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    left = Path("/run/netns", f"dilocox-{int(done.stdout)}-at-a")
    assert left.exists()
    with Network(["a"]):
        assert not left.exists()


@needs_network
def test_what_a_watched_process_left_goes_when_it_is_killed() -> None:
    script = (
        "import os, signal\nfrom dilocox.tools.testbed import Network, watchdog\n"
        "with watchdog.watched():\n"
        "    network = Network(['a']).__enter__()\n"
        "    network.start('a', ['sleep', '600'], start_new_session=True, stdout=-3)\n"
        "    print(os.getpid(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    left = Path("/run/netns", f"dilocox-{int(done.stdout)}-at-a")
    deadline = time.monotonic() + 20
    while left.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left.exists()


@needs_network
def test_a_child_that_enters_a_host_has_its_network() -> None:
    with Network(["a", "b"]) as network:
        child = os.fork()
        if child == 0:
            network.enter("b")
            text = Path("/proc/self/net/dev").read_text()
            os._exit(0 if "eth0" in text else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


CONTROL = """
import socket, sys
TCP_CONGESTION = 13
if sys.argv[1] == "serve":
    with socket.create_server(("", 5000)) as door:
        print("open", flush=True)
        with door.accept()[0] as line:
            print(line.getsockopt(6, TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
else:
    with socket.create_connection((sys.argv[1], 5000)) as line:
        print(line.getsockopt(6, TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""


@needs_network
def test_all_connections_have_the_congestion_control_that_is_set() -> None:
    with Network(["a", "b"]) as network:
        network.congest("reno")
        server = network.start("b", [sys.executable, "-c", CONTROL, "serve"], stdout=-1)
        assert server.stdout is not None
        assert server.stdout.readline() == "open\n"
        client = network.run("a", [sys.executable, "-c", CONTROL, network.address("b")])
        assert (client.strip(), server.communicate()[0].strip()) == ("reno", "reno")
        with pytest.raises(LabError):
            network.congest("nothing-such")


def test_without_root_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns.sys, "platform", "linux")
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    assert unsupported_reason() == "network namespaces need root"


def test_counters_are_subtracted_field_by_field() -> None:
    assert Counters(10, 8, 6, 4, 2).since(Counters(1, 2, 3, 4, 2)) == Counters(9, 6, 3, 0, 0)
