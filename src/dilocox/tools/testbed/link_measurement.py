"""What links really do: rates of every access line and pair, round trips between hosts.

A rate is measured with datagrams, a quarter more than the link should carry, and read from the
interface counters while they flow: so it is the link's and not TCP's, also where a round trip is
long. Each direction of a line is measured against a host that is faster; links that do not share a
line are measured at the same time, as far as the machine can drive them.
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
"""A link whose measured rate is further off is not measured on."""
AT_ONCE = 400e6
"""Bits per second: what the machine may have to drive while it measures, all links together."""
FRAMES = 200
"""A measurement lasts at least as long as so many full frames take."""
SETTLE = 0.4
"""Seconds in which the bucket is emptied and the queue fills up."""
UNSEEN = 0.2
"""Seconds after a measurement in which the next one sees nothing yet: its processes start."""
TRIES = 3
"""What is found slow is measured again: the machine may have been busy elsewhere."""
READINGS = 20
QUICK_READING = 0.002
"""Seconds: a reading of counters that took no longer is taken at once."""
ROUND_TRIPS = 7
"""Per pair of hosts, the first left out; the median counts."""

# On fast links the kernel cuts what is handed to it at once into datagrams (103: UDP_SEGMENT), and
# what waits at a slow link may be more than a socket usually holds (32: SO_SNDBUFFORCE): a sender
# that the machine holds up for some milliseconds must not show.
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
    """One direction of a link, as it was measured."""

    link: str
    """`paris up`, `paris down`, `paris to lyon`."""
    source: str
    target: str
    asked_bits_per_second: float
    bits_per_second: float

    @property
    def off_by(self) -> float:
        """Relative error of the link."""
        return self.bits_per_second / self.asked_bits_per_second - 1.0

    @property
    def is_slow(self) -> bool:
        """It moved too little; the machine may have been busy."""
        return self.off_by < -TOLERANCE

    def check(self) -> None:
        """Raise `LabError` if the link is off by more than `TOLERANCE`."""
        if abs(self.off_by) > TOLERANCE:
            raise LabError(
                f"link {self.link}: {show_rate(self.asked_bits_per_second)} were asked for, "
                f"{show_rate(self.bits_per_second)} measured ({self.off_by:+.1%}); nothing can be "
                "measured on it: is the machine busy, or the rate above what it moves?"
            )


@dataclass(frozen=True)
class Transfer:
    """What is to be measured: one direction of a link, by what `source` sends to `target`."""

    link: str
    source: str
    target: str
    rate: float
    """Bits per second that should be seen."""
    port: str
    """Host whose port of the switch sees this link alone."""
    receives: bool
    """What this port receives counts; else what it sends."""
    shaped_source: bool = False
    """The source has a line of its own to fill, which is not the one that is measured."""


def transfers(links: Links, hosts: Sequence[str]) -> list[Transfer]:
    """One transfer per shaped direction of a line, and per direction of a pair with a rate.

    Raises `LabError` if a line cannot be filled, since all other hosts are slower.
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
        raise LabError(f"link {transfer.link}: cannot be measured, every host is behind a pair")
    free.sort(key=lambda host: links.line(host).down is None)
    return Transfer(**{**vars(transfer), "target": free[-1]})


def _down(links: Links, host: str, others: Sequence[str], rate: float) -> Transfer:
    # From a host without a line, if there is one: it can fill several lines at the same time.
    sources = list(reversed(others))
    sources.sort(key=lambda other: links.line(other).up is not None)
    for source in sources:
        path = links.path(source, host)
        if path == rate:
            shaped = links.line(source).up is not None
            return Transfer(f"{host} down", source, host, rate, host, False, shaped)
    raise LabError(f"link {host} down: cannot be measured, every other host is slower")


def batches(every: Sequence[Transfer], at_once: float) -> list[list[Transfer]]:
    """Transfers that can run at the same time: no port and no sending line twice, and not more
    than `at_once` bits per second in all (a single one may exceed it)."""
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
    """Two transfers would be seen together at one port, or share a sending line."""
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
    """Measure links, each over `seconds` or longer; `delay` seconds of a packet on its way.

    As many at a time as `batches` says. Raises `LabError` if something cannot be measured.
    """
    found = {}
    for batch in batches(every, at_once):
        for transfer, rate in zip(batch, _rates(network, batch, seconds, delay), strict=True):
            found[transfer] = rate
    return [Measured(t.link, t.source, t.target, t.rate, found[t]) for t in every]


def measure_all(
    network: Network, seconds: float, at_once: float = AT_ONCE, delay: float = 0.0
) -> list[Measured]:
    """Measure every shaped link of `network`, as `measure` does; what is slow is tried again.

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
    """Measure all shaped links of `network`, over `seconds` each at least.

    Raises `LabError` if none is shaped, and for a link that is off by more than `TOLERANCE`:
    nothing may be reported that was measured on it.
    """
    if not network.links.shaped:
        raise LabError("no link is shaped, there is nothing to measure")
    return measure_all(network, seconds)


def _rates(
    network: Network, batch: Sequence[Transfer], seconds: float, delay: float
) -> list[float]:
    """Bits per second of every transfer of a batch."""
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
    # What is still in a slow link's queue would be counted, or waited for, in what follows.
    time.sleep(max(0.0, drain_seconds(slowest) + delay - UNSEEN))
    found = []
    for transfer in batch:
        counted = last[transfer.port].since(first[transfer.port])
        # What a host sends is what its port receives.
        size = counted.sent_bytes if transfer.receives else counted.received_bytes
        found.append(size * 8 / (end - begin))
    return found


def reading(network: Network) -> tuple[float, dict[str, Counters]]:
    """All counters and when they were read (`time.monotonic`), to a millisecond or so.

    A busy machine may hold this process up between the two: then they are read again.
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
    """Seconds that a small packet takes there and back, median, for every two of `hosts`.

    The links should be idle. Raises `LabError` if no answer comes.
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
