"""Runs of the time to a loss: which methods are trained, at which rates and lengths (PROTOCOL.md).

Pure: what to train next follows from the rows that are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.evidence.cells import Cell
from benchmarks.evidence.rates import next_trial, rounded
from benchmarks.quality.rows import Entry, Settings, core_entries
from benchmarks.quality.tuning import Rates
from dilocox.coordinator.controller.message_load import EXCHANGE_BYTES, message_rate

Row = dict[str, Any]
Source = Literal["perl", "mixed"]
Kind = Literal["plain", "reference", "link"]
"""A run of this machine's processes, whose time does not count; a timed run of synchronous training
without a limit on its links; or a timed run on the link."""

STEPS, WARMUP = 640, 40
BATCH = 128
"""Sequences per inner step, of all sites together."""
SITES = ("site-0", "site-1")
EVALUATE = 40
"""Inner steps between evaluations."""
HELD_OUT = 256
RATIO = 400.0
"""Time in which fp32 gradients cross the link, over the time of a step."""
BASELINE, OURS, UNDECLARED = "allreduce", "dilocox", "dilocox undeclared"
TOLD = "dilocox told"
"""dilocox whose run file counts the messages to the coordinator (SECOND.md)."""
OWN = (OURS, TOLD, UNDECLARED)
RIVALS = ("diloco", "sparseloco", "dilocox-paper")
LENGTHS = (1.05, 1.1, 1.25, 1.5, 2.0)
"""Lengths of further runs of dilocox, over that of synchronous training."""
RIVAL_LENGTHS = (1.25, 2.0)
SEEDS: dict[Source, tuple[int, ...]] = {"perl": (0, 1, 2), "mixed": (0,)}
SECOND_SEEDS: dict[Source, tuple[int, ...]] = {"perl": (1, 2), "mixed": (0,)}
"""Seeds of the second protocol."""
FRAGMENTS, ROUND = 2, 2
"""Fragments, and inner steps of a round, for which the messages of `TOLD` are counted."""
FACTOR = 2.0
"""Second rate that is tried for a rival, over the rate of the quality benchmark."""


@dataclass(frozen=True)
class Case:
    """One run: a method on a text, with its seed, inner learning rate and length."""

    kind: Kind
    source: Source
    label: str
    seed: int
    rate: float
    length: float = 1.0
    """Inner steps over those of synchronous training."""

    @property
    def steps(self) -> int:
        """Number of inner steps."""
        return round(self.length * STEPS)

    @property
    def key(self) -> Row:
        """The fields that identify the row."""
        return {
            "kind": self.kind,
            "source": self.source,
            "label": self.label,
            "seed": self.seed,
            "learning_rate": self.rate,
            "length": self.length,
        }

    def __str__(self) -> str:
        return (
            f"{self.label} ({self.kind}), {self.source}, seed {self.seed}, rate {self.rate:g}, "
            f"{self.steps} steps"
        )


def entries() -> dict[str, Entry]:
    """Return the methods by label, with the settings of the quality benchmark.

    dilocox has none here: `declared` gives it what its run file says of the link.
    """
    known = {entry.label: entry for entry in core_entries()}
    named = {label: known[label] for label in (BASELINE, *RIVALS)}
    ours = {label: Entry(label, "dilocox", tuned_as="dilocox") for label in OWN}
    return {**named, **ours}


def declared(case: Case, link: str, step_seconds: float) -> Settings:
    """Return the keys of the run file that a timed run of dilocox has besides its rates.

    `link`: the link in kbit, as the run file writes it. `step_seconds`: seconds of an inner step.
    """
    if case.label == OURS:
        return {"control.link": link, "control.step_seconds": step_seconds}
    if case.label != TOLD:
        return {}
    rate = 1e3 * float(link.removesuffix("kbit"))
    messages = message_rate(ROUND, FRAGMENTS, step_seconds, ranks=1)
    return {
        "control.link": f"{(rate - messages) / 1e3:.3f}kbit",
        "control.step_seconds": step_seconds,
        "control.latency": round(8 * EXCHANGE_BYTES / rate, 4),
        "outer.fragments": FRAGMENTS,
    }


Known = Mapping[str, Rates]
"""Rates of the quality benchmark, by label."""


def of(rows: Sequence[Row], case: Case) -> Row | None:
    """Return the row of a run. None if the run was not made."""
    key = case.key
    return next((row for row in rows if all(row[k] == v for k, v in key.items())), None)


def trial(rows: Sequence[Row], source: Source, rates: Known) -> Case | None:
    """Return the next trial of synchronous training with the first seed. None: all are made."""
    rate = next_trial(_cell(source), BASELINE, rates[BASELINE].inner, tried(rows, source))
    return None if rate is None else Case("plain", source, BASELINE, SEEDS[source][0], rate)


def _cell(source: Source) -> Cell:
    """Return a cell of the evidence benchmark whose trials go on beyond the best rate."""
    return Cell("unseen", source, "0.67M", sites=len(SITES), rule="full")


def tried(rows: Sequence[Row], source: Source) -> dict[float, float]:
    """Return the losses of synchronous training by inner rate. Infinite if training diverged."""
    return {
        row["learning_rate"]: math.inf if row["val_loss"] is None else row["val_loss"]
        for row in rows
        if (row["kind"], row["source"], row["label"]) == ("plain", source, BASELINE)
    }


def rivals(rows: Sequence[Row], source: Source, rates: Known, loss: float) -> Iterator[Case]:
    """Yield the missing runs of the other methods: at two rates, and longer above `loss`."""
    seed = SEEDS[source][0]
    for label in RIVALS:
        start = rounded(rates[label].inner)
        first = [Case("plain", source, label, seed, r) for r in (start, rounded(FACTOR * start))]
        missing = [case for case in first if of(rows, case) is None]
        yield from missing
        if missing:
            continue
        best = min(first, key=lambda case: _loss(of(rows, case)))
        for length in RIVAL_LENGTHS:
            if _reached(rows, best, loss):
                break
            best = Case("plain", source, label, seed, best.rate, length)
            if of(rows, best) is None:
                yield best
                break


def timed(
    rows: Sequence[Row], source: Source, seed: int, rate: float, ours: float, label: str = OURS
) -> Case | None:
    """Return the next timed run of a seed. None: all are made.

    `rate` and `ours`: inner learning rates of synchronous training and of dilocox. First comes
    synchronous training, then dilocox as `label`, then longer runs of it until one reaches the
    loss. With `OURS` the first seed of `perl` also has a run that measures the link itself.
    """
    reference = Case("reference", source, BASELINE, seed, rate)
    known = of(rows, reference)
    if known is None:
        return reference
    for length in (1.0, *LENGTHS):
        case = Case("link", source, label, seed, ours, length)
        if of(rows, case) is None:
            return case
        if _reached(rows, case, known["val_loss"]):
            break
    undeclared = Case("link", source, UNDECLARED, seed, ours)
    first = (source, seed, label) == ("perl", SEEDS["perl"][0], OURS)
    wanted = first and of(rows, undeclared) is None
    return undeclared if wanted else None


def _reached(rows: Sequence[Row], case: Case, loss: float) -> bool:
    return _loss(of(rows, case)) <= loss


def _loss(row: Row | None) -> float:
    if row is None or row["val_loss"] is None:
        return math.inf
    return float(row["val_loss"])
