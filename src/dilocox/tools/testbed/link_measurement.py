"""Measures links: the rates of all access lines and pairs, and round trips between hosts.

A sender sends datagrams at 1.25 times the link's requested rate, and the rate is read from the
interface counters meanwhile. It is therefore the link's rate and not TCP's, even with a long round
trip. Each direction of a line is measured against a faster host. Links that share no line are
measured at the same time, as far as the machine can drive them.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.link_spec import Links, least, show_rate
from dilocox.tools.testbed.netns import Counters, Network
from dilocox.tools.testbed.shaping import FRAME_BYTES, drain_seconds

TOLERANCE = 0.05
"""Largest relative error of a link's rate. A lab with a larger error refuses to measure."""
AT_ONCE = 400e6
"""Most bits per second of all links that are measured at the same time."""
FRAMES = 200
"""Least number of full frames that a measurement takes."""
SETTLE = 0.4
"""Seconds before a measurement in which the bucket empties and the queue fills."""
UNSEEN = 0.2
"""Seconds after a measurement in which the next one does not count yet: its processes start."""
TRIES = 3
"""Most measurements of a link that is found slow, because the machine may have been busy."""
READINGS = 20
"""Most tries to read the counters quickly."""
QUICK_READING = 0.002
"""Seconds: a reading of the counters that takes at most this long is accepted at once."""
ROUND_TRIPS = 7
"""Round trips per pair of hosts. The first one is left out, and the median of the others counts."""

# A sender that the machine delays for some milliseconds must not change the result. On fast links
# the kernel therefore cuts one large write into datagrams (103: UDP_SEGMENT), and at slow links
# more data may wait than a socket usually holds (32: SO_SNDBUFFORCE).
_SEND = """\
import socket, sys, time
address, rate = sys.argv[1], float(sys.argv[2])
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.setsockopt(socket.SOL_SOCKET, 32, 1 << 24)
frame = 1514 * 8
count = max(1, min(40, int(rate / frame * 0.0005)))
if count > 1:
    link.setsockopt(socket.IPPROTO_UDP, 103, 1472)
block = bytes(1472 * count)
begin, sent = time.monotonic(), 0
print("sending", flush=True)
while True:
    due = (time.monotonic() - begin) * rate / frame
    while sent < due:
        link.sendto(block, (address, 9))
        sent += count
    time.sleep(0.0005)
"""
_ECHO = """\
import socket, sys
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind((sys.argv[1], 7))
print("ready", flush=True)
while True:
    link.sendto(*link.recvfrom(64))
"""
_PING = """\
import socket, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.settimeout(5)
for address in sys.argv[2:]:
    for number in range(int(sys.argv[1])):
        begin = time.monotonic()
        link.sendto(bytes([number]), (address, 7))
        while link.recvfrom(64)[0][0] != number:
            pass
        print(time.monotonic() - begin)
"""


@dataclass(frozen=True)
class Measured:
    """Measured rate of one direction of a link."""

    link: str
    """`paris up`, `paris down`, `paris to lyon`."""
    source: str
    target: str
    asked_bits_per_second: float
    bits_per_second: float

    @property
    def off_by(self) -> float:
        """Relative error of the link's rate; negative if the link is too slow."""
        return self.bits_per_second / self.asked_bits_per_second - 1.0

    @property
    def is_slow(self) -> bool:
        """Whether the rate is too low; the machine may have been busy."""
        return self.off_by < -TOLERANCE

    def check(self) -> None:
        """Raise `LabError` if the link is off by more than `TOLERANCE`."""
        if abs(self.off_by) > TOLERANCE:
            raise LabError(
                f"link {self.link}: {show_rate(self.asked_bits_per_second)} requested, but "
                f"{show_rate(self.bits_per_second)} measured ({self.off_by:+.1%}); the machine is "
                "too busy, or cannot reach this rate: stop other programs, or choose a lower rate"
            )


@dataclass(frozen=True)
class Transfer:
    """One direction of a link that is to be measured by traffic from `source` to `target`."""

    link: str
    source: str
    target: str
    rate: float
    """Expected bits per second."""
    port: str
    """Host whose port at the switch carries the traffic of this link only."""
    receives: bool
    """Whether the bytes that this port receives count; otherwise the bytes that it sends."""
    shaped_source: bool = False
    """Whether the source has a shaped uplink that is not the measured link."""


def transfers(links: Links, hosts: Sequence[str]) -> list[Transfer]:
    """Return one transfer per shaped direction of a line, and per direction of a shaped pair.

    Raises `LabError` if a line cannot be filled because all other hosts are slower.
    """
    found = []
    for host in hosts:
        line, others = links.line(host), [other for other in hosts if other != host]
        if line.up is not None:
            found.append(Transfer(f"{host} up", host, others[-1], line.up, host, True))
        if line.down is not None:
            found.append(_down(links, host, others, line.down))
    for pair in links.pairs:
        for source, target in (pair, pair[::-1]):
            rate = least(links.line(source).up, links.pair(source, target))
            assert rate is not None
            name = f"{source} to {target}"
            found.append(Transfer(name, source, target, rate, source, True))
    # The other end of an uplink must not have a rate of its own to this host.
    return [_elsewhere(links, t, hosts) if t.link.endswith(" up") else t for t in found]


def _elsewhere(links: Links, transfer: Transfer, hosts: Sequence[str]) -> Transfer:
    free = [h for h in hosts if h != transfer.source and links.pair(h, transfer.source) is None]
    if not free:
        raise LabError(
            f"link {transfer.link}: cannot be measured, because each of the other hosts has a rate "
            f"of its own to {transfer.source}; leave out one of these in --links"
        )
    free.sort(key=lambda host: links.line(host).down is None)
    return Transfer(**{**vars(transfer), "target": free[-1]})


def _down(links: Links, host: str, others: Sequence[str], rate: float) -> Transfer:
    # A host without a shaped uplink is preferred, since it can fill several lines at a time.
    sources = list(reversed(others))
    sources.sort(key=lambda other: links.line(other).up is not None)
    for source in sources:
        path = links.path(source, host)
        if path == rate:
            shaped = links.line(source).up is not None
            return Transfer(f"{host} down", source, host, rate, host, False, shaped)
    raise LabError(f"link {host} down: cannot be measured, every other host is slower")


def batches(every: Sequence[Transfer], at_once: float) -> list[list[Transfer]]:
    """Group transfers that can run at the same time.

    Transfers of a group share no port and no sending line, and have at most `at_once` bits per
    second together. A single transfer may exceed that.
    """
    found: list[list[Transfer]] = []
    for transfer in every:
        for batch in found:
            total = sum(other.rate for other in batch) + transfer.rate
            if total <= at_once and not any(_touch(transfer, other) for other in batch):
                batch.append(transfer)
                break
        else:
            found.append([transfer])
    return found


def _touch(one: Transfer, other: Transfer) -> bool:
    """Return whether two transfers are counted at the same port, or share a sending line."""
    if one.source == other.source and (one.shaped_source or other.shaped_source):
        return True
    ways = [{(t.source, True), (t.target, False)} for t in (one, other)]
    return (one.port, one.receives) in ways[1] or (other.port, other.receives) in ways[0]


def measure(
    network: Network,
    every: Sequence[Transfer],
    seconds: float,
    at_once: float = AT_ONCE,
    delay: float = 0.0,
) -> list[Measured]:
    """Measure links, each for at least `seconds`. `delay`: seconds of a packet on its way.

    Links of one group of `batches` are measured at the same time. Raises `LabError` if a link
    cannot be measured.
    """
    found = {}
    for batch in batches(every, at_once):
        for transfer, rate in zip(batch, _rates(network, batch, seconds, delay), strict=True):
            found[transfer] = rate
    return [Measured(t.link, t.source, t.target, t.rate, found[t]) for t in every]


def measure_all(
    network: Network, seconds: float, at_once: float = AT_ONCE, delay: float = 0.0
) -> list[Measured]:
    """Measure every shaped link of `network` (see `measure`); slow links are measured again.

    Raises `LabError` for a link that is off by more than `TOLERANCE`: nothing may be reported that
    was measured on it.
    """
    every = transfers(network.links, network.hosts)
    found: dict[str, Measured] = {}
    for _ in range(TRIES):
        left = [t for t in every if t.link not in found or found[t.link].is_slow]
        for link in measure(network, left, seconds, at_once, delay):
            found[link.link] = link
    for link in found.values():
        link.check()
    return [found[transfer.link] for transfer in every]


def verify_links(network: Network, seconds: float = 1.0) -> list[Measured]:
    """Measure all shaped links of `network`, each for at least `seconds`.

    Raises `LabError` if none is shaped, and for a link that is off by more than `TOLERANCE`:
    nothing may be reported that was measured on it.
    """
    if not network.links.shaped:
        raise LabError("no link is shaped, so there is nothing to measure")
    return measure_all(network, seconds)


def _rates(
    network: Network, batch: Sequence[Transfer], seconds: float, delay: float
) -> list[float]:
    """Return the measured bits per second of every transfer of a batch."""
    slowest = min(transfer.rate for transfer in batch)
    seconds = max(seconds, FRAMES * FRAME_BYTES * 8 / slowest)
    senders = []
    try:
        for transfer in batch:
            target = [network.address(transfer.target), str(transfer.rate * 1.25)]
            senders.append(_start(network, transfer.source, _SEND, *target))
        for sender in senders:
            _first_line(sender)
        time.sleep(SETTLE + delay)
        begin, first = reading(network)
        time.sleep(seconds)
        end, last = reading(network)
    finally:
        _end(senders)
    # Data left in a slow link's queue would disturb the next measurement.
    time.sleep(max(0.0, drain_seconds(slowest) + delay - UNSEEN))
    found = []
    for transfer in batch:
        counted = last[transfer.port].since(first[transfer.port])
        # The port at the switch receives what the host sends.
        size = counted.sent_bytes if transfer.receives else counted.received_bytes
        found.append(size * 8 / (end - begin))
    return found


def reading(network: Network) -> tuple[float, dict[str, Counters]]:
    """Return the time (`time.monotonic`, to about a millisecond) and all counters at that time.

    A busy machine may delay this process between the two readings; they are then repeated.
    """
    best: tuple[float, float, dict[str, Counters]] | None = None
    for _ in range(READINGS):
        before = time.monotonic()
        counted = network.all_counters()
        took = time.monotonic() - before
        if best is None or took < best[0]:
            best = took, before + took / 2, counted
        if took < QUICK_READING:
            break
    assert best is not None
    return best[1], best[2]


def round_trips(network: Network, hosts: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return the median round trip of a small packet in seconds, for every pair of `hosts`.

    The links should be idle. Raises `LabError` if a host does not answer.
    """
    pairs = list(itertools.combinations(hosts, 2))
    started = [_start(network, host, _ECHO, network.address(host)) for host in hosts]
    try:
        for echo in started:
            _first_line(echo)
        clients = {
            host: _start(
                network,
                host,
                _PING,
                str(ROUND_TRIPS),
                *(network.address(other) for one, other in pairs if one == host),
            )
            for host in hosts[:-1]
        }
        started += clients.values()
        answers = {host: _all_numbers(client, host) for host, client in clients.items()}
    finally:
        _end(started)
    found = {}
    for one, other in pairs:
        own, answers[one] = answers[one][:ROUND_TRIPS], answers[one][ROUND_TRIPS:]
        found[one, other] = statistics.median(own[1:])
    return found


def _start(network: Network, host: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    python = [sys.executable, "-I", "-c", script, *arguments]
    return network.start(host, python, stdout=pipe, stderr=pipe)


def _first_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    if not process.stdout.readline():
        process.wait()
        said = process.stderr.read().strip().splitlines()[-1:] or ["it ended"]
        raise LabError(f"the links cannot be measured: {said[0]}")


def _all_numbers(process: subprocess.Popen[str], host: str) -> list[float]:
    printed, said = process.communicate()
    if process.returncode != 0:
        why = said.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise LabError(f"{host}: round trips cannot be measured ({why[0]})")
    return [float(line) for line in printed.split()]


def _end(started: Sequence[subprocess.Popen[str]]) -> None:
    for process in started:
        process.kill()
    for process in started:
        process.communicate()
