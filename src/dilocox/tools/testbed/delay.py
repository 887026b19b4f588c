"""Adds delay to all links of a lab, with the kernel's `netem` or a relay in user space.

Frames of a host are redirected at its port of the switch to a device of their own, held there, and
returned to the switch. The device is an `ifb` with `netem`, or a TAP device that
`dilocox.tools.testbed.relay` serves. Shaping does not change, so rates are the same with delay.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence

from dilocox.tools.testbed import cgroups
from dilocox.tools.testbed.addressing import Layout
from dilocox.tools.testbed.commands import LabError, call, ip, tc
from dilocox.tools.testbed.netns import Network

LONGEST = 2.0
"""Largest delay in seconds, one way. Nobody trains over links with longer round trips."""
NETEM = "netem delay {microseconds}us limit 1000000"
"""Options of `netem`. The limit is in packets, more than any link of a lab holds at a time."""


class Delay:
    """All packets between hosts of `network` take `seconds` longer, from `open` to `close`."""

    def __init__(self, network: Network, seconds: float) -> None:
        if not 0 < seconds <= LONGEST:
            raise LabError(f"delay {seconds:g} s: choose one from 1 ms to {LONGEST:g} s")
        self.seconds = seconds
        self.relayed = False
        """Whether the relay delays packets, and not the kernel."""
        self._network = network
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Begin to delay packets. Raises `LabError` if that fails."""
        layout = self._network.layout
        self.relayed = not has_netem(layout)
        devices = [f"{'t' if self.relayed else 'i'}{layout.port(host)}" for host in layout.hosts]
        if self.relayed:
            self._start_relay(devices)
            _attach_taps(layout, devices)
        else:
            _attach_netem(layout, devices, self.seconds)
        redirect: list[str] = []
        for host, device in zip(layout.hosts, devices, strict=True):
            port = layout.port(host)
            redirect += [
                f"qdisc add dev {port} ingress",
                f"filter add dev {port} parent ffff: protocol all prio 1 u32 match u32 0 0 "
                f"action mirred egress redirect dev {device}",
            ]
        tc(layout.switch, redirect)

    def check_alive(self) -> None:
        """Raise `LabError` if the relay has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise LabError(f"the relay that delays packets ended (code {self._process.returncode})")

    def close(self) -> None:
        """End the relay. The kernel's devices vanish with the namespaces."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _start_relay(self, devices: Sequence[str]) -> None:
        # The relay runs at no site and in no site's quota: a real link costs sites no CPU time.
        command = ["ip", "netns", "exec", self._network.layout.switch, sys.executable, "-m",
                   "dilocox.tools.testbed.relay", str(self.seconds), *devices]  # fmt: skip
        if self._network.group is not None:
            command = cgroups.entered(self._network.group, command)
        self._process = subprocess.Popen(  # noqa: S603 - this package's own module
            command,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            said = self._process.communicate()[1].strip().splitlines()[-1:] or ["it ended"]
            raise LabError(f"the relay that delays packets cannot start: {said[0]}")


def has_netem(layout: Layout) -> bool:
    """Return whether the kernel has `netem`."""
    with contextlib.suppress(LabError):
        tc(layout.switch, ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
        return True
    return False


def _attach_taps(layout: Layout, devices: Sequence[str]) -> None:
    """Let frames that the relay writes enter the switch, and no other frames reach the relay."""
    for host, device in zip(layout.hosts, devices, strict=True):
        switch = layout.switch
        ip("-n", switch, "link", "set", device, "txqueuelen", "20000", "up")
        ip("-n", switch, "link", "set", device, "master", "br0")
        off = ["learning", "off", "flood", "off", "mcast_flood", "off", "bcast_flood", "off"]
        ip("-n", switch, "link", "set", device, "type", "bridge_slave", *off)
        # The switch must reach the host at its port, though its frames come in by the TAP device.
        entry = [layout.mac(host), "dev", layout.port(host), "master", "static"]
        call(["bridge", "-n", switch, "fdb", "replace", *entry])


def _attach_netem(layout: Layout, devices: Sequence[str], seconds: float) -> None:
    """Create an `ifb` with `netem` per host; it returns frames to the port that they came from."""
    for device in devices:
        ip("-n", layout.switch, "link", "add", device, "type", "ifb")
        ip("-n", layout.switch, "link", "set", device, "up")
    netem = NETEM.format(microseconds=round(seconds * 1e6))
    tc(layout.switch, [f"qdisc add dev {device} root {netem}" for device in devices])
