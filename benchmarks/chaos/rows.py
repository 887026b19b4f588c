"""Computes result rows from the records of runs with faults: stalls and recoveries."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Blow:
    """One fault that was injected."""

    kind: str
    site: str
    """The site with the fault, or `hub` for the coordinator."""
    began: float
    """Begin of the fault, by the clock of metrics.jsonl."""
    ended: float
    """Time at which all sites contributed again."""


def round_times(records: Sequence[Record], struck: str) -> list[float]:
    """Return the sorted times at which each round was first reported by another site than
    `struck`, the site with the fault."""
    first: dict[int, float] = {}
    for record in records:
        if record["kind"] == "round" and record.get("site") not in (None, struck):
            first[record["round"]] = min(record["time"], first.get(record["round"], float("inf")))
    return sorted(first.values())


def stall(blow: Blow, times: Sequence[float]) -> float:
    """Return the longest time between rounds around a fault, minus the usual time, in seconds.

    `times`: see `round_times`.
    """
    gaps = list(itertools.pairwise(times))
    usual = statistics.median(end - start for start, end in gaps)
    near = [end - start for start, end in gaps if end >= blow.began and start <= blow.ended]
    return max(0.0, max(near, default=0.0) - usual)


def fault_rows(blows: Sequence[Blow], records: Sequence[Record]) -> list[Row]:
    """Return one row per fault, for the file of results."""
    return [
        {
            "fault": blow.kind,
            "site": blow.site,
            "stall_seconds": round(stall(blow, round_times(records, blow.site)), 2),
            "recovery_seconds": round(blow.ended - blow.began, 2),
        }
        for blow in blows
    ]


def anchors_differ(records: Sequence[Record]) -> bool:
    """Return whether two sites have shown different anchors after the same round.

    The coordinator declares a site lost whose anchor differs from that of most sites, and the run
    goes on. So its end does not tell.
    """
    shown: dict[int, dict[str, str]] = {}
    for record in records:
        if record["kind"] == "round" and record.get("site") and record.get("anchor_digest"):
            shown.setdefault(record["round"], {})[record["site"]] = record["anchor_digest"]
    return any(len(set(found.values())) > 1 for found in shown.values())


def part_row(
    summary: Record, ledger: Sequence[Record], reference: float, records: Sequence[Record]
) -> Row:
    """Return the results of one run. `reference`: held-out loss of the run without faults."""
    thrown = {(e["site"], e["round"]) for e in ledger if e["state"] == "returned"}
    return {
        "hangs": 0,
        "diverged": int(summary["phase"] != "finished" or anchors_differ(records)),
        "rounds": summary["rounds"],
        "discarded": len(thrown),
        "tokens_doubled": summary["sequences_doubled"],
        "tokens_lost": summary["sequences_missing"],
        "loss_ratio": round(summary["val_loss_last"] / reference, 4),
    }


HUNG: Row = {
    "hangs": 1, "diverged": 0, "rounds": 0, "discarded": 0, "tokens_doubled": 0, "tokens_lost": 0,
    "loss_ratio": None,
}  # fmt: skip
"""Row instead of `part_row`, for a run that had to be killed."""


def rows_of(kinds: Sequence[str], faults: Sequence[Row], parts: Sequence[Row]) -> list[Row]:
    """Return one row per kind of fault, with median and worst, and one row for all runs
    together."""
    rows: list[Row] = []
    for kind in kinds:
        own = [fault for fault in faults if fault["fault"] == kind]
        if not own:
            continue
        row: Row = {"fault": kind, "count": len(own)}
        for what in ("stall", "recovery"):
            values = [fault[f"{what}_seconds"] for fault in own]
            row[f"{what}_seconds"] = round(statistics.median(values), 2)
            row[f"{what}_worst"] = round(max(values), 2)
        rows.append(row)
    ratios = [part["loss_ratio"] for part in parts if part["loss_ratio"] is not None]
    whole: Row = {"fault": "run", "count": len(faults), "parts": len(parts)}
    for key in ("hangs", "diverged", "rounds", "discarded", "tokens_doubled", "tokens_lost"):
        whole[key] = sum(part[key] for part in parts)
    whole["minutes"] = round(sum(part["seconds"] for part in parts) / 60, 1)
    whole["loss_ratio"] = round(statistics.median(ratios), 4) if ratios else None
    whole["loss_ratio_worst"] = max(ratios) if ratios else None
    return [*rows, whole]
