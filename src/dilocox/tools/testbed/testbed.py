"""A lab: sites on hosts of their own, with shaped links and hard CPU quotas, on one machine.

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
"""The coordinator's host: neither its links nor its processor time are limited, and like the sites
it goes before everything else on the machine. No site can be called so."""
MOST = 0.9
"""Share of the machine's cores that all sites together may have: the rest is for the coordinator,
for the kernel's part of the network, and for whoever watches."""
ROUND_TRIP_SLACK = 0.003
"""Seconds above twice the delay that a round trip may take, beside the tolerance of all links."""
SPIN_SECONDS = 0.5
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
    """What a lab's parts were measured to be, before anything is measured in it."""

    links: list[Measured]
    """Every shaped direction of a line or pair."""
    round_trips: dict[tuple[str, str], float]
    """Seconds there and back of a small packet, between every two sites, links idle."""
    cores: dict[str, float]
    """CPU cores that a busy loop gets at each site, at all of them at the same time."""

    @property
    def round_trip(self) -> float:
        """Seconds: the median over all pairs of sites; 0 for a single site."""
        every = sorted(self.round_trips.values())
        return every[len(every) // 2] if every else 0.0


class Lab:
    """Sites, and a host for the coordinator, for as long as the context lasts.

    `link` is every site's access line (`20mbit`, `20mbit/100mbit` up and down, `none`), `links` are
    settings that differ from it (`paris=5mbit`, `paris-lyon=1mbit`). `quota` is CPU cores per site,
    an equal share of `MOST` of the machine if it is left out; `quotas` are those of sites that have
    others, which makes them unequally fast. `delay` seconds are added to every
    packet on its way.

    Whatever way the context is left, all processes, namespaces, links and control groups go; a
    guard process sees to it if this one is killed. Raises `LabError` if a lab cannot be made here.
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
        # What measures, and what stands for the network, must not wait for a processor.
        self.network.group = self._groups[HUB]
        self.network.__enter__()
        if self.delay is not None:
            self.delay.open()
            with registry.changing(os.getpid()) as entry:
                entry.relayed = self.delay.relayed
        self._change(lambda _: self._first, "")

    def close(self) -> None:
        """End what runs in the lab and remove it. May be called again."""
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
        """The links as they are now, also after another process has changed them."""
        self.network.links = registry.read(os.getpid()).links
        return self.network.links

    @property
    def changes(self) -> list[tuple[float, str]]:
        """When links were changed (seconds since 1970) since the lab began, and to what."""
        return registry.read(os.getpid()).changes

    def shape(self, link: str = "none", links: Sequence[str] = ()) -> None:
        """Give all sites new links, as the constructor does; `lab.shape()` takes all limits off."""
        asked, text = _links(self.sites, link, links), " ".join([f"every site {link}", *links])
        self._change(lambda _: asked, text)

    def set(self, *settings: str) -> None:
        """Change single links: `lab.set("paris-lyon=5mbit", "paris=20mbit/100mbit")`."""
        self._change(lambda links: links.changed(settings, self.sites), " ".join(settings))

    def _change(self, change: Callable[[Links], Links], what: str) -> None:
        registry.change_links(os.getpid(), change, what)

    def verify(self, seconds: float = 1.0) -> Checked:
        """Measure all links, over `seconds` each at least, the round trips and the quotas.

        What was measured is kept until links change. The lab must be idle. Raises `LabError` for a
        link that is off by more than `link_measurement.TOLERANCE`, and for a round trip that is not
        twice the delay: nothing may be reported that was measured on it.
        """
        while True:
            entry = registry.read(os.getpid())
            self.network.links = entry.links
            # Also what was changed and set back: it is shaped anew.
            changes = len(entry.changes)
            if self._checked is not None and self._checked[0] == changes:
                return self._checked[1]
            self._checked = None
            try:
                checked = Checked(self._measured(seconds), self._round_trips(), self.cpu_shares())
            except LabError:
                if len(self.changes) == changes:
                    raise
                # Links were changed while they were measured: they are measured as they are now.
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
                    f"{one} to {other}: a round trip takes {seconds * 1e3:.1f} ms, it must be "
                    f"{self.delay.seconds * 2e3:g} with the delay that was asked for; is the "
                    "machine busy?"
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
        """CPU cores of the site that has least."""
        return min(self.quotas.values())

    # --- hosts -----------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """IPv4 address of a site or of `HUB`."""
        return self.network.address(host)

    def counters(self) -> dict[str, Counters]:
        """What the interfaces of all sites and of `HUB` have counted so far, at one moment."""
        return self.network.all_counters()

    def start(self, host: str, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command at a site, under its quota, or at `HUB`; `options` as of `Popen`.

        It ends with the lab at the latest.
        """
        command = cgroups.entered(self._groups[host], self.network.command(host, arguments))
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(command, text=True, **options)  # noqa: S603 - the caller's own

    def fork(
        self, host: str, target: Callable[..., None], *arguments: Any, name: str
    ) -> BaseProcess:
        """Run a function at a site, under its quota, or at `HUB`, in a child of this process.

        It dies with this process, which must not have computed with torch (see
        `dilocox.utils.processes`): a fork saves the seconds that importing torch takes.
        """
        return processes.start(_enter_and_call, self, host, target, arguments, name=name)

    def enter(self, host: str) -> None:
        """Move this process, of one thread, to a host and below its quota, for good."""
        cgroups.enter(self._groups[host])
        self.network.enter(host)

    def cpu_shares(self, seconds: float = SPIN_SECONDS) -> dict[str, float]:
        """CPU cores that busy loops get at every site, at all of them at the same time."""
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
    """Why no lab can be made here, in one line; none if it can."""
    return netns.unsupported_reason() or cgroups.unsupported_reason(cgroups.find())


def _enter_and_call(
    lab: Lab, host: str, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    lab.enter(host)
    target(*arguments)


def _links(sites: Sequence[str], link: str, links: Sequence[str]) -> Links:
    return Links().with_all(parse_line(link), sites).changed(links, sites)


def _quota(sites: int, asked: float | None) -> float:
    """CPU cores per site. Raises `LabError` if they are more than `MOST` of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    most = MOST * cores / sites
    if asked is None:
        asked = most
    if asked > most * 1.0001:
        raise LabError(
            f"quota {asked:g} cores: {sites} sites may have {most:.3g} each, {MOST:.0%} of the "
            f"machine's {cores} cores in all"
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
    """CPU cores by site, `asked` at those without their `own`. Raises `LabError`."""
    usual = 0.0 if all(site in own for site in sites) else _quota(len(sites), asked)
    found = {site: own.get(site, usual) for site in sites}
    for cores in found.values():
        _quota(1, cores)
    _quota(len(sites), sum(found.values()) / len(sites))
    return found


def _is_delayed(round_trip: float, delay: float) -> bool:
    """A round trip (seconds) is twice the delay, within what is let pass."""
    return 0 <= round_trip - 2 * delay <= 2 * delay * link_measurement.TOLERANCE + ROUND_TRIP_SLACK
