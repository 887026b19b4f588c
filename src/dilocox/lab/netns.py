"""A network of several hosts on one machine: namespaces, links of a given rate, counters.

Every host is a network namespace with one interface, `eth0`, whose other end is a port of a bridge
in a namespace of its own; nothing of it is visible in the machine's own network. A shaped host has
a `tc tbf` in both directions, as an access line has: on `eth0` for what it sends, on the bridge
port for what it receives. The kernel may not bundle packets on these links (one segment per
packet), so that interface counters show what a real wire would carry. TCP's congestion control is
the machine's own.

Linux only; needs root, `ip` and `tc` (iproute2). Delay and loss are not emulated, so the round
trip is that of the machine's own scheduler, far below a millisecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dilocox.errors import DilocoxError

MTU = 1500
FRAME_BYTES = MTU + 14
"""Largest frame as interface and `tbf` count it: with its Ethernet header."""
SEGMENT_BYTES = MTU - 52
"""TCP payload of such a frame: IPv4 and TCP headers with time stamps take 52 bytes."""
TOLERANCE = 0.05
"""A link whose measured rate is further off is not measured on."""

_PREFIX = "dilocox-"
_SUBNET = "10.213.77"
_CLONE_NEWNET = 0x40000000
_SEND = """\
import socket, sys, time
host, seconds = sys.argv[1], float(sys.argv[2])
link = socket.create_connection((host, 9), timeout=10)
end, block = time.monotonic() + seconds, bytes(1 << 16)
while time.monotonic() < end:
    link.sendall(block)
"""
# The first part of a transfer, with the bucket's burst and the queue filling up, is left out.
_RECEIVE = """\
import socket, sys, time
def received():
    for line in open("/proc/net/dev"):
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[0])
server = socket.create_server((sys.argv[1], 9))
server.settimeout(10)
print("ready", flush=True)
link, _ = server.accept()
link.settimeout(10)
settle = time.monotonic() + float(sys.argv[2])
while time.monotonic() < settle:
    link.recv(1 << 16)
begin, first = time.monotonic(), received()
last = begin, first
while link.recv(1 << 16):
    last = time.monotonic(), received()
print((last[1] - first) * 8 / (last[0] - begin), flush=True)
"""


class LabError(DilocoxError):
    """A network that cannot be made, or is not what it should be."""


@dataclass(frozen=True)
class Counters:
    """What an interface has counted: frames with their Ethernet headers."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int
    dropped: int

    def since(self, earlier: Counters) -> Counters:
        """What was counted after `earlier`."""
        return Counters(*(getattr(self, f) - getattr(earlier, f) for f in vars(self)))


@dataclass(frozen=True)
class Measured:
    """One measured transfer over a shaped link."""

    source: str
    target: str
    asked_bits_per_second: float
    bits_per_second: float

    @property
    def off_by(self) -> float:
        """Relative error of the link."""
        return self.bits_per_second / self.asked_bits_per_second - 1.0


def why_not() -> str | None:
    """Why no network can be made here, in one line; none if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)} (package iproute2)"
    name = f"{_PREFIX}{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", "p0", "netns", name, "type", "veth", "peer", "name", "p1", "netns", name)
        _shape(name, "p0", 1e6)
    except LabError as error:
        return str(error)
    finally:
        with contextlib.suppress(LabError):
            _ip("netns", "del", name)
    return None


class Network:
    """Hosts that reach each other through one switch; a context manager.

    `hosts` are short names. Leaving it, by whatever way, ends every process that still runs in
    one of the hosts and removes everything that was made. Raises `LabError` with the failed
    command.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = list(hosts)
        self._stem = f"{_PREFIX}{os.getpid()}-"
        self._switch = f"{self._stem}switch"
        self._rates: dict[str, float] = {}

    def __enter__(self) -> Network:
        _remove_left_over()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            name, port = self.namespace(host), f"p{number}"
            _ip("netns", "add", name)
            _ip(
                *("link", "add", port, "netns", self._switch, "type", "veth"),
                *("peer", "name", "eth0", "netns", name),
            )
            # Neighbour discovery would add frames that nobody asked for.
            quiet = "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 || true"
            self.run(host, ["sh", "-c", quiet])
            for where, device in ((name, "eth0"), (self._switch, port)):
                _ip("-n", where, "link", "set", device, "mtu", str(MTU), "gso_max_segs", "1")
            _ip("-n", self._switch, "link", "set", port, "master", "br0")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for where, device in ((self._switch, port), (name, "eth0"), (name, "lo")):
                _ip("-n", where, "link", "set", device, "up")

    def close(self) -> None:
        """End what runs in the hosts and remove them. May be called again."""
        names = [*(self.namespace(host) for host in self.hosts), self._switch]
        for name in names:
            _remove(name)

    def namespace(self, host: str) -> str:
        """Name of the host's network namespace."""
        return f"{self._stem}{host}"

    def address(self, host: str) -> str:
        """IPv4 address of `host`."""
        return f"{_SUBNET}.{self.hosts.index(host) + 1}"

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """`arguments` as a command line that runs on `host`."""
        return ["ip", "netns", "exec", self.namespace(host), *arguments]

    def run(self, host: str, arguments: Sequence[str]) -> str:
        """Run a short command on `host`; what it prints."""
        return _call(self.command(host, arguments))

    def start(
        self,
        host: str,
        arguments: Sequence[str],
        cores: Collection[int] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command on `host`, on these CPU cores only; `options` as of `Popen`."""
        pin = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        return subprocess.Popen(  # noqa: S603 - the caller's own command
            [*pin, *self.command(host, arguments)], text=True, stdin=subprocess.DEVNULL, **options
        )

    def enter(self, host: str) -> None:
        """Move this process to `host`, with all it starts from now on. It must have one thread."""
        with open(f"/run/netns/{self.namespace(host)}", "rb") as handle:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                raise LabError(f"{host}: cannot be entered ({os.strerror(ctypes.get_errno())})")

    def shape(self, rates: Mapping[str, float]) -> None:
        """Give hosts links of so many bits per second, Ethernet headers counted, each way.

        Other hosts keep what they have; without a call links are as fast as the machine.
        """
        for host, rate in rates.items():
            _shape(self.namespace(host), "eth0", rate)
            _shape(self._switch, f"p{self.hosts.index(host)}", rate)
            self._rates[host] = rate

    def counters(self, host: str) -> Counters:
        """What the host's interface has counted so far."""
        answer = json.loads(_ip("-n", self.namespace(host), "-s", "-j", "link", "show", "eth0"))
        received, sent = answer[0]["stats64"]["rx"], answer[0]["stats64"]["tx"]
        return Counters(
            sent["bytes"],
            received["bytes"],
            sent["packets"],
            received["packets"],
            sent["dropped"] + received["dropped"],
        )

    def verify(self, seconds: float = 2.0) -> list[Measured]:
        """Measure the links of all shaped hosts, each way, with transfers of `seconds`.

        Raises `LabError` for a link that is off by more than `TOLERANCE`: nothing may be reported
        that was measured on it.
        """
        shaped = list(self._rates)
        if len(shaped) < 2:
            raise LabError("a link is verified between two shaped hosts, shape two or more")
        found = []
        for source, target in zip(shaped, shaped[1:] + shaped[:1], strict=True):
            asked = min(self._rates[source], self._rates[target])
            result = Measured(source, target, asked, self.measure(source, target, seconds))
            found.append(result)
            if abs(result.off_by) > TOLERANCE:
                raise LabError(
                    f"link {source} to {target}: {asked / 1e6:.2f} Mbit/s were asked for, "
                    f"{result.bits_per_second / 1e6:.2f} measured ({result.off_by:+.1%}); nothing "
                    "can be measured on it: is the machine busy, or the rate above what it moves?"
                )
        return found

    def measure(self, source: str, target: str, seconds: float) -> float:
        """Bits per second, headers counted, that arrive at `target` when `source` sends at will."""
        address = self.address(target)
        python = [sys.executable, "-I", "-c"]
        pipe = subprocess.PIPE
        receiver = self.start(
            target, [*python, _RECEIVE, address, str(seconds / 4)], stdout=pipe, stderr=pipe
        )
        try:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            self.run(source, [*python, _SEND, address, str(seconds)])
            printed, said = receiver.communicate(timeout=seconds + 20)
        except subprocess.TimeoutExpired:
            printed, said = "", "no end"
        finally:
            receiver.kill()
            receiver.wait()
        try:
            return float(printed)
        except ValueError:
            why = said.strip().splitlines()[-1:] or ["nothing arrived"]
            raise LabError(f"link {source} to {target}: cannot be measured ({why[0]})") from None


def _shape(namespace: str, device: str, rate: float) -> None:
    """A bucket of 10 ms (4 frames at least) and a queue of 100 ms (32 frames at least)."""
    burst = max(int(rate / 8 * 0.010), 4 * FRAME_BYTES)
    limit = max(int(rate / 8 * 0.100), 32 * FRAME_BYTES) + burst
    size = ("rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(limit))
    _call(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *size])


def _ip(*arguments: str) -> str:
    return _call(["ip", *arguments])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(  # noqa: S603 - fixed commands of this module
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise LabError(f"{' '.join(command[:12])}: {said[0]}")
    return done.stdout


def _remove(name: str) -> None:
    if not Path("/run/netns", name).exists():
        return
    for process in _processes(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while any(_processes(name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(LabError):
        _ip("netns", "del", name)


def _processes(name: str) -> Iterator[int]:
    own = os.getpid()
    with contextlib.suppress(LabError):
        yield from (n for n in map(int, _ip("netns", "pids", name).split()) if n != own)


def _remove_left_over() -> None:
    """Remove what a killed process has left: its number is in the names."""
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.exists() else ():
        owner = entry.name.removeprefix(_PREFIX).partition("-")[0]
        if entry.name.startswith(_PREFIX) and owner.isdigit() and not Path("/proc", owner).exists():
            _remove(entry.name)
