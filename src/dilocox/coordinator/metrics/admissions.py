"""Verdicts on contributions, for metrics and display: which are worth a line, and their counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import boundary_slots
from dilocox.coordinator.protocol.step_share import FULL, steps_taken

Record = dict[str, Any]
KEPT = 16
"""Number of latest rounds whose plans are known."""


class Admissions:
    """Counts the verdicts of a run, and finds the lines about them."""

    def __init__(self, stages: int) -> None:
        """Prepare to count. `stages`: pipeline stages of each site."""
        self._stages = stages
        self._plans: dict[int, Mapping[str, Any]] = {}
        self._counts: dict[int, dict[str, dict[str, int]]] = {}
        """Counts of verdict codes and flags, by round and site."""
        self._said: set[tuple[int, str, str]] = set()

    def plan(self, plan: Mapping[str, Any]) -> None:
        """Take a new plan."""
        self._plans[plan["round"]] = plan
        while len(self._plans) > KEPT:
            del self._plans[min(self._plans)]

    def record(self, site: str, round_: int, verdict: Record) -> Record | None:
        """Return the record of a verdict for `metrics.jsonl`; None if it says nothing.

        `idle` in the record: the site had taken no inner step yet, so it had nothing to contribute.
        """
        said = set(verdict) > {"exchange", "code", "flags"}
        if not said and not verdict["flags"] and verdict["code"] == "admitted":
            return None
        found = {"kind": "admission", "round": round_, "site": site, **verdict}
        if verdict["code"] == "zero" and self._idle(site, round_, verdict["exchange"]):
            found["idle"] = True
        return found

    def line(self, record: Record) -> tuple[str, bool] | None:
        """Return a line about a record, and whether it is a warning; None if nothing is new."""
        site, round_, code = record["site"], record["round"], record["code"]
        # A site that withdraws has already reported the reason.
        if code in ("admitted", "withdrawn"):
            return None
        idle = record.get("idle") is True
        # A slow site has such rounds again and again: one line is enough.
        key = (-1, site, "idle") if idle else (round_, site, code)
        if key in self._said:
            return None
        self._said.add(key)
        if idle:
            speed = self._plans[round_]["members"][site]["pace"] / FULL
            return (
                f"{site}, round {round_}: has nothing for an exchange, since none of its inner "
                f"steps is done by then; that is usual for a site of {speed:.2f} of the typical "
                "speed in short rounds",
                False,
            )
        return f"{site}, round {round_}: its contribution does not count: {code}", True

    def count(self, record: Record) -> None:
        """Count a record, also one of an earlier process. A site without a step is no anomaly."""
        if record.get("idle") is True:
            return
        counts = self._counts.setdefault(record["round"], {}).setdefault(record["site"], {})
        for what in (record["code"], *record["flags"]):
            if what != "admitted":
                counts[what] = counts.get(what, 0) + 1

    def forget(self, round_: int) -> None:
        """Drop the counts of `round_` and later rounds."""
        self._counts = {r: counts for r, counts in self._counts.items() if r < round_}

    def forget_lines(self, round_: int) -> None:
        """Drop what is known of lines up to `round_`, but not of lines that are said once a run."""
        self._said = {each for each in self._said if each[0] < 0 or each[0] > round_}

    def totals(self) -> dict[str, dict[str, int]]:
        """Return counts of rejection codes and flags in the whole run, by site."""
        totals: dict[str, dict[str, int]] = {}
        for sites in self._counts.values():
            for site, counts in sites.items():
                for what, count in counts.items():
                    of_site = totals.setdefault(site, {})
                    of_site[what] = of_site.get(what, 0) + count
        return totals

    def _idle(self, site: str, round_: int, exchange: str) -> bool:
        """Return whether a site had taken no inner step of its round by an exchange's boundary."""
        plan, key = self._plans.get(round_), ExchangeKey.parse(exchange)
        if plan is None or site not in plan["members"] or not plan["slots"]:
            return False
        slots, own = plan["slots"], plan["members"][site]
        slot = boundary_slots(key.stage, self._stages, plan["fragments"], slots)[key.fragment]
        typical = slot * plan["inner_steps"] // slots
        return not steps_taken(own["pace"], own["carry"], typical)
