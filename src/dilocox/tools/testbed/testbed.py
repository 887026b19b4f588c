"""A lab: several sites on one machine, each with shaped links and a hard CPU quota.

with Lab(["paris", "lyon"], "20mbit") as lab:
    lab.verify()
    lab.start("paris", ["python", "peer.py"])
    lab.set("paris-lyon=5mbit")

`dilocox.tools.testbed.run` trains a run in it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from dilocox.tools.testbed import cgroups, cleanup, link_measurement, netns, registry, watchdog
from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.delay import Delay
from dilocox.tools.testbed.link_measurement import Measured
from dilocox.tools.testbed.link_spec import Links, parse_line
from dilocox.tools.testbed.netns import Counters, Network
from dilocox.tools.testbed.relay_limits import FASTEST
from dilocox.utils import processes

HUB = "_coordinator"
"""Name of the coordinator's host. Its links and processor time are not limited, and like the sites
it takes precedence over all else on the machine. It is not a valid name of a site."""
MOST = 0.9
"""Share of the machine's cores that all sites together may have. The rest is for the coordinator,
the kernel's network code, and other programs."""
ROUND_TRIP_SLACK = 0.003
"""Seconds by which a round trip may exceed twice the delay, in addition to the links' tolerance."""
SPIN_SECONDS = 0.5
"""Seconds for which the CPU quotas are measured."""
_SPIN = """\
import sys, time
begin, seconds = float(sys.argv[1]), float(sys.argv[2])
print("ready", flush=True)
time.sleep(max(0, begin - time.time()))
first, end = time.process_time(), time.monotonic() + seconds
while time.monotonic() < end:
    pass
print((time.process_time() - first) / seconds)
"""


@dataclass(frozen=True)
class Checked:
    """Measured properties of a lab, before a run is measured in it."""

    links: list[Measured]
    """One entry per shaped direction of a line or pair."""
    round_trips: dict[tuple[str, str], float]
    """Round trip of a small packet in seconds, for every pair of sites, with idle links."""
    cores: dict[str, float]
    """CPU cores that a busy loop gets at each site, with all sites busy at the same time."""

    @property
    def round_trip(self) -> float:
        """Median round trip over all pairs of sites, in seconds; 0 for a single site."""
        every = sorted(self.round_trips.values())
        return every[len(every) // 2] if every else 0.0


class Lab:
    """Hosts for sites and for the coordinator. A context manager.

    Args:
        sites: Names of the sites.
        link: Access line of every site: `20mbit`, `20mbit/100mbit` (up/down) or `none`.
        links: Settings of single links: `paris=5mbit`, `paris-lyon=1mbit`.
        quota: CPU cores per site. None: an equal share of `MOST` of the machine.
        quotas: CPU cores of single sites that have another quota.
        delay: Seconds that every packet is delayed.

    Leaving the context removes all processes, namespaces, links and control groups; a watchdog
    process does so if this process is killed. Raises `LabError` if a lab cannot be made here.
    """

    def __init__(
        self,
        sites: Sequence[str],
        link: str = "none",
        links: Sequence[str] = (),
        *,
        quota: float | None = None,
        quotas: Mapping[str, float] | None = None,
        delay: float = 0.0,
    ) -> None:
        self.sites = list(sites)
        self._first = _links(self.sites, link, links)
        self.quotas = _quotas(self.sites, quota, quotas or {})
        """CPU cores by site."""
        self.network = Network([*self.sites, HUB])
        self.delay = Delay(self.network, delay) if delay else None
        self._groups: dict[str, Path] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._checked: tuple[int, Checked] | None = None

    def __enter__(self) -> Lab:
        reason = unsupported_reason()
        if reason is not None:
            raise LabError(f"a lab cannot be made here: {reason}")
        cleanup.remove_left_over()
        registry.enter(self.network.hosts, self.sites)
        try:
            self._guard = watchdog.watch_over_this_process()
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
        hierarchy = cgroups.find()
        assert hierarchy is not None, "unsupported_reason has looked"
        for host in self.network.hosts:
            cores = self.quotas.get(host)
            name = f"{self.network.layout.stem}at-{host}"
            self._groups[host] = cgroups.make(hierarchy, name, cores)
        # Measuring processes and the relay must not wait for a processor.
        self.network.group = self._groups[HUB]
        self.network.__enter__()
        if self.delay is not None:
            self.delay.open()
            with registry.changing(os.getpid()) as entry:
                entry.relayed = self.delay.relayed
        self._change(lambda _: self._first, "")

    def close(self) -> None:
        """Kill all processes in the lab, and remove the lab. May be called again."""
        if self.delay is not None:
            self.delay.close()
        cleanup.remove_of(os.getpid())
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    # --- links -----------------------------------------------------------------------------

    @property
    def links(self) -> Links:
        """The current links, including changes by other processes."""
        self.network.links = registry.read(os.getpid()).links
        return self.network.links

    @property
    def changes(self) -> list[tuple[float, str]]:
        """(Unix time in seconds, new setting) of each change of links since the lab began."""
        return registry.read(os.getpid()).changes

    def shape(self, link: str = "none", links: Sequence[str] = ()) -> None:
        """Set all links as the constructor does. `lab.shape()` removes all limits."""
        asked, text = _links(self.sites, link, links), " ".join([f"every site {link}", *links])
        self._change(lambda _: asked, text)

    def set(self, *settings: str) -> None:
        """Change single links: `lab.set("paris-lyon=5mbit", "paris=20mbit/100mbit")`."""
        self._change(lambda links: links.changed(settings, self.sites), " ".join(settings))

    def _change(self, change: Callable[[Links], Links], what: str) -> None:
        registry.change_links(os.getpid(), change, what)

    def verify(self, seconds: float = 1.0) -> Checked:
        """Measure all links, each for at least `seconds`, the round trips and the quotas.

        The result is cached until links change. The lab must be idle. Raises `LabError` if a link
        is off by more than `link_measurement.TOLERANCE`, or a round trip is not twice the delay:
        measurements on such a lab must not be reported.
        """
        while True:
            entry = registry.read(os.getpid())
            self.network.links = entry.links
            # A link that was changed and changed back counts as changed: it was shaped anew.
            changes = len(entry.changes)
            if self._checked is not None and self._checked[0] == changes:
                return self._checked[1]
            self._checked = None
            try:
                checked = Checked(self._measured(seconds), self._round_trips(), self.cpu_shares())
            except LabError:
                if len(self.changes) == changes:
                    raise
                # Links were changed during the measurement, so they are measured again.
                continue
            self._checked = changes, checked

    def _round_trips(self) -> dict[tuple[str, str], float]:
        found = link_measurement.round_trips(self.network, self.sites)
        if self.delay is None:
            return found
        for _ in range(link_measurement.TRIES - 1):
            if all(_is_delayed(seconds, self.delay.seconds) for seconds in found.values()):
                return found
            self.delay.check_alive()
            found = link_measurement.round_trips(self.network, self.sites)
        for (one, other), seconds in found.items():
            if not _is_delayed(seconds, self.delay.seconds):
                raise LabError(
                    f"{one} to {other}: a round trip takes {seconds * 1e3:.1f} ms, but must take "
                    f"{self.delay.seconds * 2e3:g} ms with the requested delay; is the machine "
                    "busy?"
                )
        return found

    def _measured(self, seconds: float) -> list[Measured]:
        if not self.network.links.shaped:
            return []
        at_once, delay = link_measurement.AT_ONCE, 0.0
        if self.delay is not None:
            at_once, delay = min(at_once, FASTEST), self.delay.seconds
        return link_measurement.measure_all(self.network, seconds, at_once, delay)

    @property
    def quota(self) -> float:
        """CPU cores of the site with the smallest quota."""
        return min(self.quotas.values())

    # --- hosts -----------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """IPv4 address of a site or of `HUB`."""
        return self.network.address(host)

    def counters(self) -> dict[str, Counters]:
        """Return the interface counters of all sites and of `HUB`, read at the same moment."""
        return self.network.all_counters()

    def start(self, host: str, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command at a site, under its quota, or at `HUB`. `options` go to `Popen`.

        The command is killed at the latest when the lab ends.
        """
        command = cgroups.entered(self._groups[host], self.network.command(host, arguments))
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(command, text=True, **options)  # noqa: S603 - the caller's own

    def fork(
        self, host: str, target: Callable[..., None], *arguments: Any, name: str
    ) -> BaseProcess:
        """Run a function at a site, under its quota, or at `HUB`, in a child of this process.

        The child dies with this process. A fork saves the seconds of importing torch, but this
        process must not have computed with torch before (see `dilocox.utils.processes`).
        """
        return processes.start(_enter_and_call, self, host, target, arguments, name=name)

    def enter(self, host: str) -> None:
        """Move this process to a host and its quota for good. It must have only one thread."""
        cgroups.enter(self._groups[host])
        self.network.enter(host)

    def cpu_shares(self, seconds: float = SPIN_SECONDS) -> dict[str, float]:
        """Return the CPU cores that busy loops get at each site, all sites at the same time."""
        begin = time.time() + 0.3 + 0.02 * len(self.sites) + 0.04 / self.quota
        python = [sys.executable, "-I", "-c", _SPIN, str(begin), str(seconds)]
        pipe = subprocess.PIPE
        spinning = {
            site: [self.start(site, python, stdout=pipe) for _ in range(math.ceil(quota))]
            for site, quota in self.quotas.items()
        }
        found = {}
        for site, loops in spinning.items():
            printed = [loop.communicate()[0].split() for loop in loops]
            found[site] = sum(float(words[-1]) for words in printed)
        return found


def unsupported_reason() -> str | None:
    """Return in one line why no lab can be made here. None if one can."""
    return netns.unsupported_reason() or cgroups.unsupported_reason(cgroups.find())


def _enter_and_call(
    lab: Lab, host: str, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    lab.enter(host)
    target(*arguments)


def _links(sites: Sequence[str], link: str, links: Sequence[str]) -> Links:
    return Links().with_all(parse_line(link), sites).changed(links, sites)


def _quota(sites: int, asked: float | None) -> float:
    """Return the CPU cores per site. `asked`: requested cores; None: as many as possible.

    Raises `LabError` if they are more than `MOST` of the machine, or too few to measure.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    most = MOST * cores / sites
    if asked is None:
        asked = most
    if asked > most * 1.0001:
        raise LabError(
            f"quota {asked:g} cores: {sites} sites may have {most:.3g} each, {MOST:.0%} of the "
            f"machine's {cores} cores in total"
        )
    if asked < cgroups.LEAST:
        raise LabError(
            f"quota {asked:.3g} cores per site: below {cgroups.LEAST:g} nothing can be measured; "
            "take fewer sites or a larger machine"
        )
    return asked


def _quotas(
    sites: Sequence[str], asked: float | None, own: Mapping[str, float]
) -> dict[str, float]:
    """Return the CPU cores by site: its `own`, otherwise `asked`. Raises `LabError` as `_quota`."""
    usual = 0.0 if all(site in own for site in sites) else _quota(len(sites), asked)
    found = {site: own.get(site, usual) for site in sites}
    for cores in found.values():
        _quota(1, cores)
    _quota(len(sites), sum(found.values()) / len(sites))
    return found


def _is_delayed(round_trip: float, delay: float) -> bool:
    """Return whether a round trip is twice the delay, within the tolerance. Both in seconds."""
    return 0 <= round_trip - 2 * delay <= 2 * delay * link_measurement.TOLERANCE + ROUND_TRIP_SLACK
