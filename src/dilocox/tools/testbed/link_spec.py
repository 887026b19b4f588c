"""What links a lab has, as they are written on a command line; pure.

Every host has an access line with a rate up and a rate down; two hosts may have a rate between
them that is lower than their lines'. Rates are bits per second, Ethernet headers counted; none is
as fast as the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dilocox.config.outer import rate_text
from dilocox.tools.testbed.commands import LabError

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", re.IGNORECASE)
SLOWEST = 50e3
"""A slower link cannot be measured in a reasonable time: fewer than five packets a second."""
FASTEST = 100e9
"""What the kernel's shaper has numbers for."""


@dataclass(frozen=True)
class Line:
    """An access line: what its host sends and receives at most."""

    up: float | None = None
    down: float | None = None

    def __str__(self) -> str:
        if self.up == self.down:
            return show_rate(self.up)
        return f"{show_rate(self.up)} up, {show_rate(self.down)} down"


FREE = Line()
"""A line that is not shaped."""


@dataclass(frozen=True)
class Links:
    """All lines by host, and rates between two hosts by their names in alphabetical order."""

    lines: Mapping[str, Line] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def line(self, host: str) -> Line:
        """The host's access line."""
        return self.lines.get(host, FREE)

    def pair(self, one: str, other: str) -> float | None:
        """The rate between two hosts, each way, if they have one of their own."""
        return self.pairs.get(pair_of(one, other))

    def partners(self, host: str) -> dict[str, float]:
        """Hosts to which `host` has a rate of its own, with that rate."""
        found = {}
        for (one, other), rate in self.pairs.items():
            if host in (one, other):
                found[other if host == one else one] = rate
        return found

    def path(self, source: str, target: str) -> float | None:
        """What `source` can send to `target`: the least of all that is on the way."""
        return least(self.line(source).up, self.line(target).down, self.pair(source, target))

    @property
    def shaped(self) -> bool:
        """Anything has a rate."""
        return bool(self.pairs) or any(line != FREE for line in self.lines.values())

    def changed(self, settings: Iterable[str], hosts: Sequence[str]) -> Links:
        """These links after settings such as `paris=50mbit`, `paris-lyon=5mbit`, in order.

        `hosts` are those that may be named. Raises `LabError`.
        """
        lines, pairs = dict(self.lines), dict(self.pairs)
        for setting in settings:
            named, value = parse_setting(setting, hosts)
            if len(named) == 1:
                lines[named[0]] = parse_line(value)
                continue
            rate = parse_rate(value)
            pairs.pop(pair_of(*named), None)
            if rate is not None:
                pairs[pair_of(*named)] = rate
        return Links(lines, pairs)

    def with_all(self, line: Line, hosts: Iterable[str]) -> Links:
        """These links with the same line for all of `hosts`."""
        return replace(self, lines={**self.lines, **dict.fromkeys(hosts, line)})

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `from_json`."""
        return {
            "lines": {host: [line.up, line.down] for host, line in self.lines.items()},
            "pairs": [[*names, rate] for names, rate in self.pairs.items()],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Links:
        """What `to_json` made."""
        return cls(
            {host: Line(*rates) for host, rates in content["lines"].items()},
            {(one, other): rate for one, other, rate in content["pairs"]},
        )


def pair_of(one: str, other: str) -> tuple[str, str]:
    """Two hosts in alphabetical order."""
    return (one, other) if one < other else (other, one)


def least(*rates: float | None) -> float | None:
    """The lowest of some rates; none if none of them is limited."""
    return min((rate for rate in rates if rate is not None), default=None)


def parse_rate(text: str) -> float | None:
    """Bits per second of `200mbit`, none of `none`. Raises `LabError`."""
    if text == "none":
        return None
    found = _RATE.fullmatch(text)
    if found is None:
        raise LabError(f'rate "{text}": write it as 200kbit, 1.5mbit or 1gbit, or none')
    rate = float(found[1]) * _UNITS[found[2].lower()]
    if rate < SLOWEST:
        raise LabError(f'rate "{text}": below {show_rate(SLOWEST)} a link cannot be measured')
    if rate > FASTEST:
        raise LabError(f'rate "{text}": at most {show_rate(FASTEST)}, or none')
    return rate


def parse_line(text: str) -> Line:
    """An access line: `20mbit` both ways, `20mbit/100mbit` up and down. Raises `LabError`."""
    up, slash, down = text.partition("/")
    return Line(parse_rate(up), parse_rate(down if slash else up))


def parse_setting(text: str, hosts: Sequence[str]) -> tuple[list[str], str]:
    """Hosts (one: its access line; two: between them) and value of `HOST=...`, `HOST-HOST=...`.

    Raises `LabError` for names that are no hosts, or that can be read in two ways.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise LabError(f"{text}: write it as SITE=RATE or SITE-SITE=RATE")
    read = [[name]] if name in hosts else []
    for place in (found.start() for found in re.finditer("-", name)):
        one, other = name[:place], name[place + 1 :]
        if one in hosts and other in hosts and one != other:
            read.append([one, other])
    if len(read) > 1:
        raise LabError(f"{text}: {name} can be read in two ways; rename a site")
    if not read:
        raise LabError(
            f"{text}: {name} names no site and no two sites; the lab has {', '.join(hosts)}"
        )
    return read[0], value


def show_rate(rate: float | None) -> str:
    """`200 Mbit/s`; `unshaped` for none."""
    return "unshaped" if rate is None else rate_text(rate, digits=4)
