"""Delay: the round trip that is asked for, at the rate that is asked for."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.support.lab_needs import needs_lab, needs_network

from dilocox.tools.testbed import HUB, Lab, LabError, delay, link_measurement, registry
from dilocox.tools.testbed.delay import Delay
from dilocox.tools.testbed.link_spec import Links
from dilocox.tools.testbed.netns import Network
from dilocox.tools.testbed.relay_limits import check_relayed, sends

pytestmark = pytest.mark.alone


@needs_lab
def test_round_trips_take_twice_the_delay_and_rates_stay() -> None:
    with Lab(["a", "b"], "20mbit", ["a-b=5mbit"], quota=0.12, delay=0.03) as lab:
        checked = lab.verify(0.4)  # refuses what is off
        to_hub = link_measurement.round_trips(lab.network, ["a", HUB])["a", HUB]
    assert 0.06 <= checked.round_trips["a", "b"] < 0.066
    assert len(checked.links) == 6
    # The coordinator is as far away as the sites are from each other.
    assert 0.06 <= to_hub < 0.07


@needs_lab
def test_a_relay_refuses_what_it_cannot_carry_and_is_missed_when_it_ends() -> None:
    with Lab(["a", "b", "c"], "5mbit", quota=0.12, delay=0.01) as lab:
        assert lab.delay is not None
        before = lab.links
        if not lab.delay.relayed:
            pytest.skip("this kernel has netem, no relay is needed")
        refused = "the relay carries 100 Mbit/s per site and 200"
        for settings in (["a=101mbit", "b=101mbit"], ["a=80mbit", "b=80mbit", "c=80mbit"]):
            # As `dilocox lab set` of another process does it.
            with pytest.raises(LabError, match=refused):
                registry.change_links(
                    os.getpid(), lambda links, s=settings: links.changed(s, lab.sites), ""
                )
        with pytest.raises(LabError, match=refused):
            lab.shape()
        assert lab.links == before
        lab.set("a=90mbit", "b=90mbit")
        assert lab.delay._process is not None
        os.kill(lab.delay._process.pid, signal.SIGKILL)
        lab.delay._process.wait()
        with pytest.raises(LabError, match=r"the relay that delays packets ended \(code -9\)"):
            lab.delay.check_alive()


def test_what_a_site_can_send_is_the_least_of_what_is_on_its_ways() -> None:
    sites = ["a", "b", "c"]
    links = Links().changed(["a=100mbit", "b=none/30mbit", "c=none/20mbit"], sites)
    assert sends(links, "a", sites) == 50e6  # what the others can receive
    assert sends(links, "b", sites) == 120e6
    check_relayed(links.changed(["b=70mbit/30mbit", "c=80mbit/20mbit"], sites), sites)  # 50, 70, 80
    for setting in ("b=none/30mbit", "c=81mbit/20mbit", "c=none"):
        with pytest.raises(LabError, match=r"choose slower links \(--link, --links\) or no delay"):
            check_relayed(
                links.changed(["b=70mbit/30mbit", "c=80mbit/20mbit", setting], sites), sites
            )
    # What nobody fills in training must be filled while it is measured.
    fast = Links().changed(["a=20mbit/101mbit", "b=20mbit", "c=20mbit"], sites)
    with pytest.raises(LabError):
        check_relayed(fast, sites)
    unshaped = Links()
    assert sends(unshaped, "a", sites) is None
    with pytest.raises(LabError):
        check_relayed(unshaped, sites)
    pairs = unshaped.changed(["a-b=1mbit", "a-c=2mbit", "b-c=3mbit"], sites)
    assert [sends(pairs, site, sites) for site in sites] == [3e6, 4e6, 5e6]
    check_relayed(pairs, sites)


@needs_network
def test_a_kernel_with_netem_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way through an `ifb`: with `netem` where the kernel has it, else with a bucket in its
    place, which shows that packets take that way and come back."""
    with Network(["a", "b"]) as network:
        there = delay.has_netem(network.layout)
        monkeypatch.setattr(delay, "has_netem", lambda _: True)
        if not there:
            monkeypatch.setattr(delay, "NETEM", "tbf rate 4mbit burst 6056 limit 60000")
        held = Delay(network, 0.02)
        held.open()
        found = link_measurement.round_trips(network, ["a", "b"])
        network.shape(Links().changed(["a=10mbit"], ["a", "b"]))
        send = link_measurement.Transfer("a up", "a", "b", 10e6, "b", False)
        link = link_measurement.measure(network, [send], 0.5)[0]
    if there:
        assert 0.04 <= found["a", "b"] < 0.045
        link.check()
    else:
        assert link.bits_per_second == pytest.approx(4e6, rel=0.05)


@pytest.mark.parametrize("seconds", [-1.0, 2.5])
def test_a_delay_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(LabError, match="choose one from 1 ms to 2 s"):
        Lab(["a"], delay=seconds)


@needs_network
def test_frames_leave_in_the_order_they_came_and_not_too_early() -> None:
    """The relay itself, without a network: a burst on one device."""
    import socket
    import threading

    from dilocox.tools.testbed.relay import relay

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    theirs.setblocking(False)
    handle = theirs.detach()  # the thread's, for as long as this process lives
    threading.Thread(target=relay, args=([handle], 0.05), daemon=True).start()
    begin = time.monotonic()
    for number in range(20):
        ours.send(bytes([number]) * 100)
    ours.settimeout(5)
    frames = [ours.recv(2048) for _ in range(20)]
    assert time.monotonic() - begin >= 0.05
    assert [frame[0] for frame in frames] == list(range(20))
