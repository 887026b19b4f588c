"""Computes the results of a run in a lab from its metrics and the interface counters. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.netns import Counters

Record = dict[str, Any]
Sample = tuple[float, Mapping[str, Counters]]
"""Unix time in seconds, and the interface counters of every host at that time."""
WARM_UP = 2
"""Rounds at the start that are not measured: groups are formed and caches fill in them."""


@dataclass(frozen=True)
class Window:
    """The rounds that are measured, and their wall-clock time."""

    first: int
    last: int
    """Number of the last measured round. Rounds count from 0, as in `first`."""
    begin: float
    end: float
    """Unix time in seconds of the report of round `last`. `begin` is the Unix time of the report of
    the round before `first`."""

    @property
    def rounds(self) -> int:
        """Number of measured rounds."""
        return self.last - self.first + 1

    @property
    def seconds(self) -> float:
        """Wall-clock duration of the measured rounds."""
        return self.end - self.begin


@dataclass(frozen=True)
class SiteResult:
    """Results of one site."""

    tokens_per_second: float
    """Tokens per second in the measured rounds, by wall-clock time."""
    wait_share: float
    """Share of the measured time in which training stood still for the network."""
    payload_bytes: int
    """Payload bytes sent in the whole run, the flush at its end included."""
    wire_sent_bytes: int
    wire_received_bytes: int
    """Bytes that the site's interface counted in the whole run: payloads, protocol overhead and
    control traffic."""
    payload_per_round: float
    wire_per_round: float
    """Bytes sent per measured round."""


@dataclass(frozen=True)
class RunResult:
    """A run in a lab."""

    name: str
    method: str
    window: Window
    sites: dict[str, SiteResult]
    control_bytes: int
    """Bytes that the coordinator's interface counted, in both directions together."""
    control_per_round: float
    """Bytes that a site sends to the coordinator per measured round, mean over the sites. They
    are part of `SiteResult.wire_per_round`."""
    exchange_wire_bytes: int
    """Bytes that the sites sent to each other, by their interfaces. Traffic to the coordinator is
    not included."""
    summary: Record
    records: list[Record] = field(repr=False)
    """All records of `metrics.jsonl`."""
    folder: Path

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all sites together, in the measured rounds."""
        return sum(site.tokens_per_second for site in self.sites.values())

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of all sites together, in the whole run."""
        return sum(site.payload_bytes for site in self.sites.values())

    @property
    def overhead(self) -> float:
        """Bytes on the wire between sites beyond the payloads, as a share of the payloads."""
        return self.exchange_wire_bytes / self.payload_bytes - 1 if self.payload_bytes else 0.0


@dataclass(frozen=True)
class Recording:
    """The files and counters of a run that has ended."""

    records: list[Record]
    samples: Sequence[Sample]
    """The interfaces' counters, from before the run's start to its end."""
    summary: Record
    folder: Path


def result_of(
    name: str,
    method: str,
    sites: Sequence[str],
    hub: str,
    recording: Recording,
    warm_up: int = WARM_UP,
) -> RunResult:
    """Return the results of a run.

    `recording`: the run's `metrics.jsonl` and interface counters. `hub`: host of the coordinator.
    Raises `LabError` if a site missed a round.
    """
    records, samples = recording.records, recording.samples
    rounds = rounds_by_site(records, sites)
    window = window_of(rounds, warm_up)
    flush = {r["site"]: r for r in records if r["kind"] == "flush"}
    counted = {host: samples[-1][1][host].since(samples[0][1][host]) for host in [*sites, hub]}
    found = {}
    for site in sites:
        every = rounds[site]
        measured = [r for r in every if window.first <= r["round"] <= window.last]
        payload = sum(r["payload_bytes"] for r in every)
        sent = between(samples, site, "sent_bytes", window)
        found[site] = SiteResult(
            tokens_per_second=sum(r["tokens"] for r in measured) / window.seconds,
            wait_share=sum(r["wait_seconds"] for r in measured) / window.seconds,
            payload_bytes=payload + flush.get(site, {}).get("payload_bytes", 0),
            wire_sent_bytes=counted[site].sent_bytes,
            wire_received_bytes=counted[site].received_bytes,
            payload_per_round=sum(r["payload_bytes"] for r in measured) / window.rounds,
            wire_per_round=sent / window.rounds,
        )
    # The hub receives what the sites send to it. A single site sends to the hub only, and the hub
    # may receive from other runs meanwhile, so the site's own counter is taken.
    host, field = (sites[0], "sent_bytes") if len(sites) == 1 else (hub, "received_bytes")
    control = counted[host]
    heard = between(samples, host, field, window)
    return RunResult(
        name=name,
        method=method,
        window=window,
        sites=found,
        control_bytes=control.sent_bytes + control.received_bytes,
        control_per_round=heard / window.rounds / len(sites),
        exchange_wire_bytes=sum(counted[s].sent_bytes for s in sites) - getattr(control, field),
        summary=recording.summary,
        records=records,
        folder=recording.folder,
    )


def rounds_by_site(records: Sequence[Record], sites: Sequence[str]) -> dict[str, list[Record]]:
    """Return each site's round records in order. Raises `LabError` if a site missed a round."""
    found: dict[str, list[Record]] = {site: [] for site in sites}
    for record in records:
        if record["kind"] == "round" and record.get("site"):
            found[record["site"]].append(record)
    most = max(len(rows) for rows in found.values())
    for site, rows in found.items():
        rows.sort(key=lambda r: int(r["round"]))
        if [r["round"] for r in rows] != list(range(most)) or not most:
            raise LabError(
                f"{site}: took part in {len(rows)} of {most} rounds; a run is measured only if "
                "every site takes part in every round"
            )
    return found


def window_of(rounds: Mapping[str, Sequence[Record]], warm_up: int) -> Window:
    """Return the measured rounds: all except the first `warm_up`, but at least one.

    A last round that was cut to the remaining steps is left out: its exchange is not hidden, which
    happens only once per run. Raises `LabError` if the run has fewer than two rounds.
    """
    count = min(len(rows) for rows in rounds.values())
    if count < 2:
        raise LabError("the run has only one round, in which groups are formed; train two or more")
    first = min(max(warm_up, 1), count - 1)
    if first < count - 1 and _is_cut(next(iter(rounds.values()))[:count]):
        count -= 1
    reports = [max(rows[number]["time"] for rows in rounds.values()) for number in range(count)]
    return Window(first, count - 1, reports[first - 1], reports[-1])


def _is_cut(rows: Sequence[Record]) -> bool:
    """Return whether the last of at least three rounds has fewer inner steps of the typical site
    than the round before it."""
    earlier, before, last = (row["step"] for row in rows[-3:])
    return bool(last - before < before - earlier)


def between(samples: Sequence[Sample], host: str, what: str, window: Window) -> float:
    """Return the growth of a field of `Counters` in a window, linearly interpolated."""
    first, last = (_until(samples, host, what, end) for end in (window.begin, window.end))
    return last - first


def _until(samples: Sequence[Sample], host: str, what: str, moment: float) -> float:
    times = [when for when, _ in samples]
    after = min(bisect.bisect_left(times, moment), len(samples) - 1)
    before = max(0, after - 1)
    low, high = (getattr(samples[place][1][host], what) for place in (before, after))
    length = times[after] - times[before]
    share = min(1.0, max(0.0, (moment - times[before]) / length)) if length > 0 else 0.0
    return float(low + share * (high - low))
