"""What a run's metrics say, as rounds and events. Pure.

Metrics are read as a stranger's: what is no number is none, and what is malformed is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class SiteRound:
    """What one site has reported of a round."""

    site: str
    loss: float | None
    learning_rate: float | None
    tokens: float
    seconds: float
    wait_seconds: float
    exchange_seconds: float
    payload_bytes: float
    members: int
    contributors: int
    repeated: int
    dropped: str
    """What was not finite, if its contribution was dropped."""
    mfu: float | None = None
    """Model FLOPs utilisation of the site's GPUs, a share of 1, where their peak is known."""
    memory: float | None = None
    """Peak memory of the rank that needed most, in bytes."""
    reserved: float | None = None
    """Peak of what its allocator held on a GPU, in bytes."""
    retries: float | None = None
    """How often the allocators of the site's ranks gave all back and tried again."""


@dataclass(frozen=True)
class Round:
    """A round of the whole run."""

    number: int
    step: int
    """Inner steps of a site by its end."""
    loss: float | None
    tokens: float
    seconds: float
    tokens_per_second: float
    wait_share: float
    payload_bytes: float
    allreduce_bytes: float
    anchor: str
    """Digest of the anchor that all sites held at its end."""
    time: float
    sites: tuple[SiteRound, ...]
    mfu: float | None = None
    """Of the GPUs of all sites whose peak is known."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss of the anchor."""

    after_round: int
    step: int
    loss: float


@dataclass(frozen=True)
class Event:
    """Something that happened, in words. `about`: `members`, `plan`, or nothing."""

    time: float
    text: str
    about: str = ""


@dataclass(frozen=True)
class Admission:
    """What was decided about one site's contribution to one exchange."""

    round: int
    site: str
    code: str
    """`admitted`, or why it did not count."""
    flags: tuple[str, ...]
    """What people should look at; they decide nothing."""
    norm: float | None
    """Its norm over the sites' median norm."""
    cosine: float | None
    """Of the angle to the mean of the others."""
    gain: float | None
    """How much lower the held-out loss is with it alone."""


@dataclass
class History:
    """All of it, without what a resumed run left behind."""

    rounds: list[Round] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    flush_bytes: float = 0.0
    """Payloads of the flush, all sites together."""
    resumes: list[int] = field(default_factory=list)
    """Rounds that the run went back to."""
    began: float | None = None
    last: float | None = None
    """Unix seconds of the first and the newest record."""
    bad_lines: int = 0

    @property
    def sites(self) -> list[str]:
        """Names of all sites that have reported, in the order of their first report."""
        return list(dict.fromkeys(each.site for row in self.rounds for each in row.sites))

    def of(self, site: str) -> list[SiteRound]:
        """One site's rounds."""
        return [each for row in self.rounds for each in row.sites if each.site == site]


def read_history(records: Iterable[Record]) -> History:
    """The course of a run from the records of its `metrics.jsonl`, in the file's order."""
    found = History()
    rounds: dict[int, Record] = {}
    by_site: dict[int, dict[str, SiteRound]] = {}
    evaluations: dict[int, Evaluation] = {}
    flush: dict[str, float] = {}
    for record in records:
        kind, number, site = record.get("kind"), _integer(record, "round"), _text(record, "site")
        time = _number(record, "time")
        if time is not None:
            found.began = time if found.began is None else found.began
            found.last = time
        if kind == "round" and site:
            by_site.setdefault(number, {})[site] = _site_round(site, record)
        elif kind == "round":
            rounds[number] = record
        elif kind == "flush":
            flush[site] = _number(record, "payload_bytes") or 0.0
        elif kind == "evaluation":
            loss, after = _number(record, "val_loss"), _integer(record, "after_round")
            if loss is not None:
                evaluations[after] = Evaluation(after, _integer(record, "step"), loss)
        elif kind == "admission":
            found.admissions.append(admission(number, site, record))
        elif kind == "message":
            about = "members" if record.get("about") == "members" else ""
            found.events.append(Event(time or 0.0, _text(record, "text"), about))
        elif kind == "plan":
            found.events.append(Event(time or 0.0, _plan(record), "plan"))
        elif kind == "resumed":
            rounds = {n: row for n, row in rounds.items() if n < number}
            by_site = {n: row for n, row in by_site.items() if n < number}
            evaluations = {n: row for n, row in evaluations.items() if n < number}
            flush = {}
            found.admissions = [each for each in found.admissions if each.round < number]
            found.resumes.append(number)
    found.rounds = [
        _round(number, rounds[number], by_site.get(number, {})) for number in sorted(rounds)
    ]
    found.evaluations = [evaluations[number] for number in sorted(evaluations)]
    found.flush_bytes = sum(flush.values())
    return found


def _site_round(site: str, record: Record) -> SiteRound:
    return SiteRound(
        site=site,
        loss=_number(record, "loss"),
        learning_rate=_number(record, "learning_rate"),
        tokens=_number(record, "tokens") or 0.0,
        seconds=_number(record, "seconds") or 0.0,
        wait_seconds=_number(record, "wait_seconds") or 0.0,
        exchange_seconds=_number(record, "exchange_seconds") or 0.0,
        payload_bytes=_number(record, "payload_bytes") or 0.0,
        members=_integer(record, "members"),
        contributors=_integer(record, "contributors"),
        repeated=_integer(record, "repeated_exchanges"),
        dropped=_text(record, "dropped"),
        mfu=_number(record, "mfu"),
        memory=_number(record, "peak_memory_bytes"),
        reserved=_number(record, "peak_reserved_bytes"),
        retries=_number(record, "allocation_retries"),
    )


def admission(number: int, site: str, record: Record) -> Admission:
    """From a record of the metrics or of the log: norm and cosine in thousandths, gain in
    millionths."""

    def score(name: str, unit: float) -> float | None:
        value = _number(record, name)
        return None if value is None else value / unit

    flags = record.get("flags")
    return Admission(
        round=number,
        site=site,
        code=_text(record, "code"),
        flags=tuple(str(flag) for flag in flags) if isinstance(flags, list) else (),
        norm=score("norm", 1e3),
        cosine=score("cosine", 1e3),
        gain=score("gain", 1e6),
    )


def _round(number: int, record: Record, sites: Mapping[str, SiteRound]) -> Round:
    return Round(
        number=number,
        step=_integer(record, "step"),
        loss=_number(record, "loss"),
        tokens=_number(record, "tokens") or 0.0,
        seconds=_number(record, "seconds") or 0.0,
        tokens_per_second=_number(record, "tokens_per_second") or 0.0,
        wait_share=_number(record, "wait_share") or 0.0,
        payload_bytes=_number(record, "payload_bytes") or 0.0,
        allreduce_bytes=_number(record, "allreduce_bytes") or 0.0,
        anchor=_text(record, "anchor_digest"),
        time=_number(record, "time") or 0.0,
        sites=tuple(sites[name] for name in sorted(sites)),
        mfu=_number(record, "mfu"),
    )


def _plan(record: Record) -> str:
    return (
        f"plan from round {_integer(record, 'round')}: {_integer(record, 'inner_steps')} inner "
        f"steps, codec {_text(record, 'codec')}, landing {_integer(record, 'delay')} of "
        f"{_integer(record, 'slots')} slots later ({_text(record, 'reason')})"
    )


def _number(record: Record, key: str) -> float | None:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _integer(record: Record, key: str) -> int:
    """0 for what is no number."""
    return int(_number(record, key) or 0)


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) else ""
