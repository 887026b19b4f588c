"""Parses a run's metrics into rounds, evaluations and events. Pure functions.

Metrics are untrusted input: a value of the wrong type counts as missing, and a malformed record is
skipped. The claim `metrics` of `dilocox verify` fails for a record that is skipped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.protocol.held_out_figures import losses_by_source, pair_figures
from dilocox.coordinator.protocol.metric_lines import Subject, subject_of
from dilocox.coordinator.protocol.task_figures import Figure, reported

Record = Mapping[str, Any]


@dataclass(frozen=True)
class SiteRound:
    """One site's report of a round."""

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
    """Name of the tensor or value that was not finite, if the site's contribution was dropped for
    it. Otherwise empty."""
    mfu: float | None = None
    """Model FLOPs utilisation of the site's GPUs, 0 to 1. None if their peak is unknown."""
    memory: float | None = None
    """Peak memory of the rank that needed most, in bytes."""
    reserved: float | None = None
    """Peak memory that the CUDA allocator reserved at a rank, in bytes."""
    retries: float | None = None
    """Retries of the CUDA allocators of the site's ranks: each frees all cached memory first."""


@dataclass(frozen=True)
class Round:
    """One round of the whole run."""

    number: int
    step: int
    """Inner steps of the typical site up to the end of the round."""
    loss: float | None
    tokens: float
    seconds: float
    tokens_per_second: float
    wait_share: float
    payload_bytes: float
    allreduce_bytes: float
    anchor: str
    """Digest of the anchor at the end of the round, equal at all sites."""
    time: float
    sites: tuple[SiteRound, ...]
    mfu: float | None = None
    """Model FLOPs utilisation of all GPUs with a known peak, 0 to 1."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss of the anchor after a round."""

    after_round: int
    step: int
    loss: float
    by_source: Mapping[str, float] = field(default_factory=dict)
    """The loss of each of several sources, by name."""
    pairs: Mapping[str, float] = field(default_factory=dict)
    """Figures of held-out pairs in preference training, by field."""


@dataclass(frozen=True)
class TaskEvaluation:
    """Figures of tasks of the anchor after a round, as a site reported them."""

    after_round: int
    """-1: before training."""
    step: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Event:
    """An event of the run, as text. `about` is `members`, `plan` or empty."""

    time: float
    text: str
    about: str = ""


@dataclass(frozen=True)
class Admission:
    """Verdict on one site's contribution to one exchange."""

    round: int
    site: str
    code: str
    """`admitted`, or the reason why the contribution did not count."""
    flags: tuple[str, ...]
    """Warnings for people. They do not change the verdict."""
    norm: float | None
    """Norm of the contribution over the sites' median norm."""
    cosine: float | None
    """Cosine of the angle between the contribution and the mean of the others."""
    gain: float | None
    """Drop of the held-out loss with this contribution alone."""
    idle: bool = False
    """Whether the site had taken no inner step yet, so that zero is no anomaly."""


@dataclass
class History:
    """Rounds, evaluations and events of a run. Rounds that a resume has discarded are left out."""

    rounds: list[Round] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    tasks: list[TaskEvaluation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    flush_bytes: float = 0.0
    """Payload bytes of the flush, summed over all sites."""
    resumes: list[int] = field(default_factory=list)
    """Rounds from which the run was resumed."""
    began: float | None = None
    """Unix time of the first record, in seconds."""
    last: float | None = None
    """Unix time of the newest record, in seconds."""

    @property
    def sites(self) -> list[str]:
        """Names of all sites that have reported, in the order of their first report."""
        return list(dict.fromkeys(each.site for row in self.rounds for each in row.sites))

    def of(self, site: str) -> list[SiteRound]:
        """Return the reports of one site, in the order of rounds."""
        return [each for row in self.rounds for each in row.sites if each.site == site]


def read_history(records: Iterable[Record]) -> History:
    """Return the history of a run. `records`: lines of its `metrics.jsonl`, in the file's order."""
    found = History()
    rounds: dict[int, Record] = {}
    by_site: dict[int, dict[str, SiteRound]] = {}
    evaluations: dict[int, Evaluation] = {}
    tasks: dict[int, TaskEvaluation] = {}
    flush: dict[str, float] = {}
    for record in records:
        try:
            subject = subject_of(record) or _elsewhere(record)
        except ValueError:
            continue
        kind, number, site = subject.kind, subject.number, subject.site
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
            loss = _number(record, "val_loss")
            if loss is not None:
                step, own = _integer(record, "step"), losses_by_source(record)
                evaluations[number] = Evaluation(number, step, loss, own, pair_figures(record))
        elif kind == "tasks":
            figures = tuple(reported(record))
            tasks[number] = TaskEvaluation(number, _integer(record, "step"), figures)
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
            tasks = {n: row for n, row in tasks.items() if n < number}
            flush = {}
            found.admissions = [each for each in found.admissions if each.round < number]
            found.resumes.append(number)
    found.rounds = [
        _round(number, rounds[number], by_site.get(number, {})) for number in sorted(rounds)
    ]
    found.evaluations = [evaluations[number] for number in sorted(evaluations)]
    found.tasks = [tasks[number] for number in sorted(tasks)]
    found.flush_bytes = sum(flush.values())
    return found


def _elsewhere(record: Record) -> Subject:
    """Return what a record is about whose kind the claim `metrics` does not cover."""
    return Subject(_text(record, "kind"), _integer(record, "round"), _text(record, "site"))


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
    """Return the verdict of a record of the metrics or of the log.

    `record` has norm and cosine in thousandths, and the gain in millionths.
    """

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
        idle=record.get("idle") is True,
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
    """Return a whole number of a record; 0 if the value is not a number."""
    return int(_number(record, key) or 0)


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) else ""
