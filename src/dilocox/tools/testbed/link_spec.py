"""The links of a lab, and how they are written on a command line. Pure.

Every host has an access line with an up rate and a down rate. A pair of hosts may have a lower rate
between them. Rates are bits per second, Ethernet headers included; None is unlimited.
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
"""Lowest rate in bits per second. A slower link carries fewer than five packets per second, and
cannot be measured in a reasonable time."""
FASTEST = 100e9
"""Highest rate in bits per second that the kernel's shaper supports."""


@dataclass(frozen=True)
class Line:
    """An access line: the most that its host can send and receive, in bits per second."""

    up: float | None = None
    down: float | None = None

    def __str__(self) -> str:
        if self.up == self.down:
            return show_rate(self.up)
        return f"{show_rate(self.up)} up, {show_rate(self.down)} down"


FREE = Line()
"""An unlimited line."""


@dataclass(frozen=True)
class Links:
    """Access lines by host, and rates of pairs of hosts, by their names in alphabetical order."""

    lines: Mapping[str, Line] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def line(self, host: str) -> Line:
        """Return the host's access line."""
        return self.lines.get(host, FREE)

    def pair(self, one: str, other: str) -> float | None:
        """Return the rate of a pair of hosts, in each direction. None if the pair has none."""
        return self.pairs.get(pair_of(one, other))

    def partners(self, host: str) -> dict[str, float]:
        """Return the rate of every pair of `host`, by the other host."""
        found = {}
        for (one, other), rate in self.pairs.items():
            if host in (one, other):
                found[other if host == one else one] = rate
        return found

    def path(self, source: str, target: str) -> float | None:
        """Return the rate from `source` to `target`: the lowest on the way. None: unlimited."""
        return least(self.line(source).up, self.line(target).down, self.pair(source, target))

    @property
    def shaped(self) -> bool:
        """Whether any link has a rate."""
        return bool(self.pairs) or any(line != FREE for line in self.lines.values())

    def changed(self, settings: Iterable[str], hosts: Sequence[str]) -> Links:
        """Return the links after settings such as `paris=50mbit`, `paris-lyon=5mbit`, in order.

        `hosts`: hosts that a setting may name. Raises `LabError` for a setting that is not valid.
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
        """Return the links with the line `line` for all of `hosts`."""
        return replace(self, lines={**self.lines, **dict.fromkeys(hosts, line)})

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        return {
            "lines": {host: [line.up, line.down] for host, line in self.lines.items()},
            "pairs": [[*names, rate] for names, rate in self.pairs.items()],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Links:
        """Return the links from the values of `to_json`."""
        return cls(
            {host: Line(*rates) for host, rates in content["lines"].items()},
            {(one, other): rate for one, other, rate in content["pairs"]},
        )


def pair_of(one: str, other: str) -> tuple[str, str]:
    """Return the two hosts in alphabetical order."""
    return (one, other) if one < other else (other, one)


def least(*rates: float | None) -> float | None:
    """Return the lowest of some rates; None stands for unlimited."""
    return min((rate for rate in rates if rate is not None), default=None)


def parse_rate(text: str) -> float | None:
    """Return the bits per second of a text such as `200mbit`. `none` gives None: unlimited.

    Raises `LabError` if the text is not a rate, or the rate is too low or too high.
    """
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
    """Return the access line of `20mbit` (up and down) or `20mbit/100mbit` (up/down).

    Raises `LabError` as `parse_rate`.
    """
    up, slash, down = text.partition("/")
    return Line(parse_rate(up), parse_rate(down if slash else up))


def parse_setting(text: str, hosts: Sequence[str]) -> tuple[list[str], str]:
    """Return hosts and value of `HOST=...` (an access line) or `HOST-HOST=...` (a pair).

    Raises `LabError` for a name that is not a host, or is ambiguous.
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
    """Return a rate as text such as `200 Mbit/s`; `unshaped` for None."""
    return "unshaped" if rate is None else rate_text(rate, digits=4)
