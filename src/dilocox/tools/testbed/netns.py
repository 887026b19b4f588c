"""A network of several hosts on one machine: namespaces, shaped links, and interface counters.

Every host is a network namespace with one interface, `eth0`. Its other end is a port of a bridge,
which has a namespace of its own, so nothing is visible in the machine's own network. The kernel
may not bundle packets on these links (one segment per packet), so that interface counters show
what a real wire would carry. TCP congestion control is the machine's, unless `congest` changes it.

Linux only; needs root, `ip` and `tc` (iproute2).
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dilocox.tools.testbed import cgroups, cleanup
from dilocox.tools.testbed.addressing import DEVICE, Layout, check_hosts
from dilocox.tools.testbed.commands import PREFIX, LabError, call, ip, tc
from dilocox.tools.testbed.link_spec import Line, Links
from dilocox.tools.testbed.shaping import FRAME_BYTES, MTU, SEGMENT_BYTES, apply

__all__ = ["FRAME_BYTES", "SEGMENT_BYTES", "Counters", "LabError", "Network", "unsupported_reason"]
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Counters:
    """Counters of an interface. Bytes include the Ethernet headers of frames."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int
    dropped: int

    def since(self, earlier: Counters) -> Counters:
        """Return the counts since `earlier`."""
        return Counters(*(getattr(self, f) - getattr(earlier, f) for f in vars(self)))


def unsupported_reason() -> str | None:
    """Return in one line why no network can be made here. None if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)} (package iproute2)"
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("link", "add", "p0", "netns", name, "type", "veth", "peer", "name", "p1", "netns", name)
        tc(name, ["qdisc add dev p0 root tbf rate 1mbit burst 6056 limit 50000"])
    except LabError as error:
        return str(error)
    finally:
        with contextlib.suppress(LabError):
            ip("netns", "del", name)
    return None


class Network:
    """Hosts that are connected by one switch. A context manager.

    `hosts` are short names. Leaving the context kills all processes that still run in a host, and
    removes everything that was made. Raises `LabError` with the command that failed.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.layout = Layout(os.getpid(), check_hosts(hosts))
        self.links = Links()
        self.group: Path | None = None
        """Control group of the commands that `start` starts. None: the caller's group."""

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts."""
        return list(self.layout.hosts)

    def __enter__(self) -> Network:
        cleanup.remove_left_over()
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
        switch = self.layout.switch
        ip("netns", "add", switch)
        _no_ipv6(switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        ip("-n", switch, "link", "set", "br0", "up")
        for host in self.hosts:
            name, port = self.namespace(host), self.layout.port(host)
            ip("netns", "add", name)
            ip(
                *("link", "add", port, "netns", switch, "type", "veth", "peer", "name", DEVICE),
                *("address", self.layout.mac(host), "netns", name),
            )
            _no_ipv6(name)
            for where, device in ((name, DEVICE), (switch, port)):
                ip("-n", where, "link", "set", device, "mtu", str(MTU), "gso_max_segs", "1")
            ip("-n", switch, "link", "set", port, "master", "br0")
            ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
            for where, device in ((switch, port), (name, DEVICE), (name, "lo")):
                ip("-n", where, "link", "set", device, "up")

    def close(self) -> None:
        """Kill all processes in the hosts, and remove the hosts. May be called again."""
        for name in [*map(self.namespace, self.hosts), self.layout.switch]:
            cleanup.remove_namespace(name)

    def namespace(self, host: str) -> str:
        """Name of the host's network namespace."""
        return self.layout.namespace(host)

    def address(self, host: str) -> str:
        """IPv4 address of `host`."""
        return self.layout.address(host)

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """Return a command line that runs the command `arguments` on `host`."""
        return ["ip", "netns", "exec", self.namespace(host), *arguments]

    def run(self, host: str, arguments: Sequence[str]) -> str:
        """Run a short command on `host`, and return its output. Raises `LabError` if it fails."""
        return call(self.command(host, arguments))

    def start(
        self,
        host: str,
        arguments: Sequence[str],
        cores: Collection[int] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command on `host`. `cores`: CPU cores that it may use; None: all of them.

        `options` are passed to `Popen`.
        """
        pin = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        command = [*pin, *self.command(host, arguments)]
        if self.group is not None:
            command = cgroups.entered(self.group, command)
        return subprocess.Popen(  # noqa: S603 - the caller's own command
            command, text=True, stdin=subprocess.DEVNULL, **options
        )

    def enter(self, host: str) -> None:
        """Move this process, and all that it starts from now on, to `host`. It must have only one
        thread."""
        enter_namespace(self.namespace(host))

    def shape(self, links: Links | Mapping[str, float]) -> None:
        """Shape the links of the hosts.

        `links`: all links; or a mapping from hosts to bits per second, the same up and down. Hosts
        that are not in the mapping keep their lines. Before the first call links are not limited.
        """
        if not isinstance(links, Links):
            lines = {host: Line(rate, rate) for host, rate in links.items()}
            links = Links({**self.links.lines, **lines}, self.links.pairs)
        apply(self.layout, self.links, links)
        self.links = links

    def congest(self, control: str) -> None:
        """Use the congestion control `control`, such as `cubic`, for all TCP between the hosts.

        It overrides the machine's own setting and the requests of programs.

        Raises `LabError` if the kernel does not have it.
        """
        for host in self.hosts:
            subnet = str(ipaddress.ip_interface(f"{self.address(host)}/24").network)
            ip(
                *("-n", self.namespace(host), "route", "change", subnet, "dev", DEVICE),
                *("proto", "kernel", "scope", "link", "src", self.address(host)),
                *("congctl", "lock", control),
            )

    def counters(self, host: str) -> Counters:
        """Return the counters of the host's interface."""
        return self.all_counters()[host]

    def all_counters(self) -> dict[str, Counters]:
        """Return the interface counters of all hosts, read at the same moment."""
        # They are read at the switch in one read: its port receives what the host sends.
        with inside(self.layout.switch):
            lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
        rows = {name.strip(): rest.split() for name, _, rest in (ln.partition(":") for ln in lines)}
        found = {}
        for host in self.hosts:
            row = [int(value) for value in rows[self.layout.port(host)]]
            found[host] = Counters(row[0], row[8], row[1], row[9], row[3] + row[11])
        return found

    def retransmitted(self, host: str) -> int:
        """Return the number of TCP segments that the host has retransmitted so far (RFC 4022,
        `tcpRetransSegs`)."""
        with inside(self.namespace(host)):
            lines = Path("/proc/thread-self/net/snmp").read_text(encoding="ascii").splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])


def _no_ipv6(namespace: str) -> None:
    """Disable IPv6, whose neighbour discovery would add frames to the counters."""
    quiet = (
        "for scope in all default; do "
        "echo 1 >/proc/sys/net/ipv6/conf/$scope/disable_ipv6 || true; done"
    )
    call(["ip", "netns", "exec", namespace, "sh", "-c", quiet])


def enter_namespace(name: str) -> None:
    """Move this thread into a network namespace. Raises `LabError` if that fails."""
    with open(f"/run/netns/{name}", "rb") as handle:
        _set_namespace(handle.fileno(), name)


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Move this thread to the network namespace `name` for the duration of the context.

    Raises `LabError` if the namespace cannot be entered.
    """
    with open("/proc/thread-self/ns/net", "rb") as own:
        enter_namespace(name)
        try:
            yield
        finally:
            _set_namespace(own.fileno(), "own network")


def _set_namespace(handle: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, _CLONE_NEWNET) != 0:
        raise LabError(f"{name}: cannot be entered ({os.strerror(ctypes.get_errno())})")
