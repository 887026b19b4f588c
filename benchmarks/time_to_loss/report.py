"""What the runs come to: the time to the loss of synchronous training, and bounds. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from benchmarks.time_to_loss.cases import BASELINE, OURS, OWN, RIVALS, SEEDS, STEPS, TOLD, Source
from benchmarks.time_to_loss.curve import read, seconds_to, steps_to

Row = dict[str, Any]
AIM = 1.05
"""Largest time of dilocox over that of synchronous training without a limit on its links."""


@dataclass(frozen=True)
class Reference:
    """Synchronous training of one text and seed, without a limit on its links."""

    loss: float
    seconds: float
    """Wall-clock seconds until the loss."""
    computing: float
    """The same, without waiting for exchanges."""
    bytes_per_step: float
    """Payload bytes of a site."""
    steps: int


def reference_of(row: Row) -> Reference:
    """Return what a row of synchronous training says."""
    return Reference(
        loss=row["val_loss"],
        seconds=row["seconds"],
        computing=row["seconds"] - row["wait_seconds"],
        bytes_per_step=row["payload_bytes"] / row["steps"],
        steps=row["steps"],
    )


def bound(row: Row, reference: Reference, link: float) -> float | None:
    """Return the least seconds in which a run without a network would reach the loss on a link.

    `link`: bits per second. Payload bytes take their time at the full rate; where they travel
    beside training the longer time counts. None if the run does not reach the loss.
    """
    steps = steps_to(read(row["curve"]), reference.loss)
    if steps is None:
        return None
    computing = steps * reference.computing / reference.steps
    sending = steps * float(row["payload_bytes"]) / int(row["steps"]) * 8 / link
    return max(computing, sending) if row["overlaps"] else computing + sending


def synchronous_bound(reference: Reference, link: float) -> float:
    """Return the least seconds of synchronous training on a link of `link` bits per second."""
    return reference.computing + reference.steps * reference.bytes_per_step * 8 / link


def lines(rows: Sequence[Row], source: Source) -> list[Row]:
    """Return the lines of a text's table: one per timed seed, and one bound per other method."""
    found: list[Row] = []
    for seed in SEEDS[source]:
        base = _one(rows, source, seed, "reference")
        if base is None:
            continue
        reference, link, first = reference_of(base), None, not found
        found.append(_line(BASELINE, seed, base, reference, reference.seconds, "no limit"))
        for label in OWN:
            ours = [row for row in _of(rows, source, label) if row["seed"] == seed]
            if ours:
                longest = max(ours, key=lambda row: row["length"])
                link = longest["link_bits_per_second"]
                took = seconds_to(read(longest["curve"]), reference.loss)
                found.append(_line(label, seed, longest, reference, took, "measured"))
        if link is not None and first:
            least = synchronous_bound(reference, link)
            found.append(_line(BASELINE, seed, base, reference, least, "at least"))
            found += _rivals(rows, source, seed, reference, link)
    return found


def _rivals(
    rows: Sequence[Row], source: Source, seed: int, reference: Reference, link: float
) -> list[Row]:
    found = []
    for label in RIVALS:
        own = [row for row in _of(rows, source, label) if row["seed"] == seed]
        if not own:
            continue
        reached = [(bound(row, reference, link), row) for row in own]
        times = [(took, row) for took, row in reached if took is not None]
        if times:
            took, row = min(times, key=lambda pair: pair[0])
            found.append(_line(label, seed, row, reference, took, "at least"))
        else:
            row = min(own, key=lambda row: math.inf if row["val_loss"] is None else row["val_loss"])
            found.append(_line(label, seed, row, reference, None, "not reached"))
    return found


def _line(
    label: str, seed: int, row: Row, reference: Reference, seconds: float | None, how: str
) -> Row:
    loss, link = row["val_loss"], row.get("link_bits_per_second")
    return {
        "method": label,
        "seed": seed,
        "how": how,
        "steps": row["steps"],
        "rate": row["learning_rate"],
        "loss": loss,
        "gap": None if loss is None else loss / reference.loss - 1,
        "in_all": row["reduction_total"] if label != BASELINE else None,
        "kbit_per_s": None if link is None else link / 1e3,
        "minutes": None if seconds is None else seconds / 60,
        "over_synchronous": None if seconds is None else seconds / reference.seconds,
        "over_computing": None if seconds is None else seconds / reference.computing,
        "plan": row["plans"] if label in OWN else None,
    }


def _of(rows: Sequence[Row], source: Source, label: str) -> list[Row]:
    return [row for row in rows if (row["source"], row["label"]) == (source, label)]


def _one(rows: Sequence[Row], source: Source, seed: int, kind: str) -> Row | None:
    asked = (source, seed, kind)
    return next((row for row in rows if (row["source"], row["seed"], row["kind"]) == asked), None)


def table(known: Sequence[Row]) -> str:
    """Return the lines as text."""
    return common.table(
        known,
        {
            "method": "s",
            "seed": "d",
            "how": "s",
            "steps": "d",
            "rate": "g",
            "loss": ".4f",
            "gap": "+.1%",
            "in_all": ",.0f",
            "kbit_per_s": ",.1f",
            "minutes": ",.1f",
            "over_synchronous": ",.2f",
            "over_computing": ",.2f",
        },
    )


def verdict(known: Sequence[Row], source: Source) -> str | None:
    """Return a sentence about the aim for each protocol. None without a timed run of dilocox."""
    said = [_verdict(known, source, label) for label in (OURS, TOLD)]
    return "\n".join(each for each in said if each is not None) or None


def _verdict(known: Sequence[Row], source: Source, label: str) -> str | None:
    ratios = [
        line["over_synchronous"]
        for line in known
        if line["method"] == label and line["over_synchronous"] is not None
    ]
    missed = sum(line["method"] == label and line["minutes"] is None for line in known)
    if not ratios:
        return None if not missed else f"{source}: {label} did not reach the loss"
    middle = statistics.median(ratios)
    met = "which meets" if middle <= AIM and not missed else "which MISSES"
    return (
        f"{source}: {label} takes {middle:.3f} times the time of {STEPS} synchronous steps without "
        f"a limit on the links (median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f}; "
        f"{missed} did not reach the loss), {met} {AIM:g}"
    )
