"""Turns link rates into `tc` commands: for access lines of hosts, and between pairs of hosts.

An access line is a `tbf` on the host's interface for the host's uplink, and a `tbf` on its port of
the switch for the downlink. A host with rates to single other hosts has an `htb` for its uplink. It
has one class for the line, and below it a class for every other host. `u32` selects the class by
the address. A class is promised an equal share of the line, and may borrow up to its own rate.

Like those of real access lines, every bucket holds 10 ms of traffic (at least two frames), and
every queue 100 ms (at least 32 frames).
"""

from __future__ import annotations

from collections.abc import Iterator

from dilocox.tools.testbed.addressing import DEVICE, Layout
from dilocox.tools.testbed.commands import tc
from dilocox.tools.testbed.link_spec import Links

MTU = 1500
FRAME_BYTES = MTU + 14
"""Bytes of the largest frame, with its Ethernet header, as the interface, `tbf` and `htb` count."""
SEGMENT_BYTES = MTU - 52
"""TCP payload of the largest frame: IPv4 and TCP headers with time stamps take 52 bytes."""
_UNLIMITED = 40e9
"""Bits per second of an unlimited line whose classes have rates. It is above what any machine
reaches."""
_FIRST_CLASS = 16


def apply(layout: Layout, before: Links, after: Links) -> None:
    """Change the shaping of all hosts from `before` to `after`.

    Links that stay the same are not touched, and a change of a rate loses no packets. Raises
    `LabError` if `tc` fails.
    """
    at_switch: list[str] = []
    for host in layout.hosts:
        own = list(_sends(layout, host, before, after))
        tc(layout.namespace(host), own)
        at_switch += _line(layout.port(host), before.line(host).down, after.line(host).down)
    tc(layout.switch, at_switch)


def _sends(layout: Layout, host: str, before: Links, after: Links) -> Iterator[str]:
    """Yield the `tc` commands for a host's uplink and its rates to other hosts."""
    old, new = before.partners(host), after.partners(host)
    line = after.line(host).up
    if old == new and before.line(host).up == line:
        return
    if not new:
        if old:
            yield f"qdisc del dev {DEVICE} root"
        yield from _line(DEVICE, None if old else before.line(host).up, line)
        return
    if not old:
        if before.line(host).up is not None:
            yield f"qdisc del dev {DEVICE} root"
        yield f"qdisc add dev {DEVICE} root handle 1: htb default 2"
    others = [other for other in layout.hosts if other != host]
    most = _UNLIMITED if line is None else line
    share = most / (len(others) + 1)
    yield _class("1:", "1:1", most, most)
    yield from _leaf(2, share, most)
    for place, other in enumerate(others):
        ceiling = min(most, new.get(other, most))
        number = _FIRST_CLASS + place
        yield from _leaf(number, min(share, ceiling), ceiling)
        if not old:
            yield (
                f"filter add dev {DEVICE} parent 1: protocol ip prio 1 u32 "
                f"match ip dst {layout.address(other)}/32 flowid 1:{number:x}"
            )


def _leaf(number: int, rate: float, ceiling: float) -> Iterator[str]:
    yield _class("1:1", f"1:{number:x}", rate, ceiling)
    limit = _queue(ceiling) + _burst(ceiling)
    yield f"qdisc replace dev {DEVICE} parent 1:{number:x} handle {number:x}: bfifo limit {limit}"


def _class(parent: str, name: str, rate: float, ceiling: float) -> str:
    return (
        f"class replace dev {DEVICE} parent {parent} classid {name} htb "
        f"rate {int(rate)}bit ceil {int(ceiling)}bit quantum {4 * FRAME_BYTES} "
        f"burst {_burst(rate)} cburst {_burst(ceiling)}"
    )


def _line(device: str, before: float | None, after: float | None) -> Iterator[str]:
    """Yield the `tc` commands for one direction of an access line."""
    if before == after:
        return
    if after is None:
        yield f"qdisc del dev {device} root"
        return
    size = f"burst {_burst(after)} limit {_queue(after) + _burst(after)}"
    yield f"qdisc replace dev {device} root tbf rate {int(after)}bit {size}"


def drain_seconds(rate: float) -> float:
    """Return the seconds in which a full queue empties. `rate`: bits per second of the link."""
    return _queue(rate) * 8 / rate


def _burst(rate: float) -> int:
    return max(int(rate / 8 * 0.010), 2 * FRAME_BYTES)


def _queue(rate: float) -> int:
    return max(int(rate / 8 * 0.100), 32 * FRAME_BYTES)
