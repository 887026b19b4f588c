"""Turns the sites' reports into the run's metrics, its summary and records for a display."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.metrics.admissions import Admissions
from dilocox.coordinator.metrics.declared_link import DeclaredLink
from dilocox.coordinator.metrics.privacy import PrivacyAccount
from dilocox.coordinator.metrics.sinks import Metrics, finite
from dilocox.coordinator.protocol.held_out_figures import beside_loss
from dilocox.coordinator.protocol.site_reports import (
    FIRST,
    RESERVED,
    checked,
    kind_of_report,
    settled_anchor,
)
from dilocox.coordinator.protocol.task_figures import moment
from dilocox.errors import DifferentAnchorsError, TrainingError
from dilocox.utils.json_lines import object_of
from dilocox.utils.plain_text import plain
from dilocox.utils.storage import replace_file, when_there_is_room

Record = dict[str, Any]
Emit = Callable[[Record], None]
CHOSEN = (
    "inner_steps", "slots", "fragments", "delay", "codec", "learning_rate", "momentum",
    "residual_decay", "residual_view", "keep",
)  # fmt: skip
"""Fields of a plan that may change from round to round."""
REMEMBERED = 8
"""Number of latest rounds to which a late report can still be added."""
WRITTEN = 1000
"""Number of rounds for which the reports in the file are known. After a restart a site's latest
report comes again, however old it is, and must not be written twice."""
SUMMED = (
    "step", "tokens", "seconds", "wait_share", "payload_bytes", "allreduce_bytes", "loss",
    "anchor_digest", "mfu", "peak_flops", "peak_memory_bytes", "peak_reserved_bytes",
    "allocation_retries",
)  # fmt: skip
"""Fields of a round that the summary needs."""


def combine(reports: Mapping[str, Record], members: int = 0) -> Record:
    """Combine the sites' reports of a round into one record of the run.

    The loss is weighted by tokens, over the sites whose loss is finite. Tokens, tokens per second
    and bytes are sums over the sites, and the wait share is the largest of a site. `waited_for`
    holds, by site, the seconds that all other sites together waited for it. Raises `TrainingError`
    if all `members` sites have reported, their anchors differ and no anchor has a majority.
    """
    rows = list(reports.values())
    settled = settled_anchor(reports, members)
    if settled is None and len(reports) >= members:
        held = ", ".join(
            f"{site} {(row['anchor_digest'] or 'none')[:12]}" for site, row in reports.items()
        )
        raise TrainingError(
            f"round {rows[0]['round']}: the sites hold different anchors ({held}); this is a "
            "defect of dilocox or of a machine, the run was stopped"
        )
    tokens = sum(row["tokens"] for row in rows)
    payload = sum(row["payload_bytes"] for row in rows)
    dense = sum(row["allreduce_bytes"] for row in rows)
    trained = [row for row in rows if math.isfinite(row.get("loss", math.nan))]
    weight = sum(row["tokens"] for row in trained)
    combined: Record = {
        "round": rows[0]["round"],
        "step": max(row["step"] for row in rows),
        "sites": len(rows),
        "tokens": tokens,
        "seconds": max(row["seconds"] for row in rows),
        "tokens_per_second": sum(row["tokens_per_second"] for row in rows),
        "wait_share": max(row["wait_share"] for row in rows),
        "waited_for": _waited_for(rows),
        "payload_bytes": payload,
        "allreduce_bytes": dense,
        "ratio_per_transfer": sum(row["ratio_per_transfer"] for row in rows) / len(rows),
        "ratio_per_token": dense / payload if payload else 0.0,
        "anchor_digest": None if settled is None else settled[0],
    }
    if weight:
        combined["loss"] = sum(row["loss"] * row["tokens"] for row in trained) / weight
    return combined | of_devices(rows)


def of_devices(rows: Sequence[Record]) -> Record:
    """Combine the known device metrics of sites.

    MFU is over the GPUs whose peak FLOP/s are known, peak memory is the largest of a rank, and
    retries are summed over all memory allocators.
    """
    found: Record = {}
    measured = [row for row in rows if "mfu" in row and row.get("peak_flops")]
    if measured:
        peak = sum(row["peak_flops"] for row in measured)
        found["mfu"] = sum(row["mfu"] * row["peak_flops"] for row in measured) / peak
    for name, together in (
        ("peak_memory_bytes", max),
        ("peak_reserved_bytes", max),
        ("allocation_retries", sum),
    ):
        values = [row[name] for row in rows if name in row]
        if values:
            found[name] = together(values)
    return found


def _waited_for(rows: Sequence[Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for site, seconds in row.get("waited_for", {}).items():
            found[site] = found.get(site, 0.0) + seconds
    return found


class RunMetrics:
    """Writes `metrics.jsonl` and `summary.json` in the run's folder and informs a display.

    For a resumed run it appends to the file and continues the counts in it.
    """

    def __init__(
        self, config: RunConfig, folder: Path, emit: Emit, account: PrivacyAccount | None = None
    ) -> None:
        """Read the file in `folder`, if there is one.

        `emit` gets every record, for a display. `account` counts contributions of private sites;
        None: no site is private.
        """
        self._config = config
        self._folder = folder
        self._emit = emit
        self._account = account
        self._members: dict[int, int] = {}
        """Number of sites in the plan, by round, for the latest rounds."""
        self._odd: set[tuple[int, str]] = set()
        """(round, site) of sites whose anchor differed from that of most sites."""
        self._open: dict[int, dict[str, Record]] = {}
        self._admissions = Admissions(config.site.stages)
        self._declared = DeclaredLink(config.control, config.site.exchanging_ranks)
        self._closed: dict[int, dict[str, Record]] = {}
        self._rounds: dict[int, Record] = {}
        self._evaluations: dict[int, float] = {}
        self._beside_loss: dict[int, Record] = {}
        """Held-out loss of each source, by the round after which it was measured."""
        self._tasks: dict[int, Record] = {}
        """Figures of tasks, by the round after which they were evaluated."""
        self._flush: dict[str, Record] = {}
        self._plan: Record = {}
        self._reason = ""
        """Reason of the latest plan, or the reason to keep it."""
        self._sequences: dict[str, int] = {}
        self._written: dict[int, set[tuple[str, str]]] = {}
        """(kind, site) of the reports in the file since the latest resume, by round."""
        for record in _read_lines(folder / "metrics.jsonl"):
            # An earlier process, perhaps an earlier version, wrote the file from sites' claims.
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                self._recall(record)
        self._metrics = Metrics(config, folder)

    def _recall(self, record: Record) -> None:
        """Take over a record that was written before this process began."""
        # NaN and infinity were written as null.
        record = {
            key: math.nan if value is None and key != "anchor_digest" else value
            for key, value in record.items()
        }
        kind, round_, site = record.get("kind"), record.get("round", 0), record.get("site")
        if site and kind in ("round", "flush"):
            checked(kind, record)
        if site and isinstance(round_, int):
            self._written.setdefault(round_, set()).add((kind_of_report(record), site))
        if kind == "round" and site:
            self._open.setdefault(round_, self._closed.pop(round_, {}))[site] = record
        elif kind == "round":
            self._rounds[round_] = _summed(record)
            self._remember(round_, self._open.pop(round_, {}))
        elif kind == "flush":
            self._flush[str(site)] = record
        elif kind == "evaluation":
            self._evaluations[int(record["after_round"])] = float(record["val_loss"])
            self._beside_loss[int(record["after_round"])] = beside_loss(record)
        elif kind == "tasks":
            self._tasks[int(record["after_round"])] = _figures(record)
        elif kind == "plan":
            self._plan = {key: record[key] for key in CHOSEN if key in record}
            self._reason = str(record.get("reason", ""))
        elif kind == "plan_kept":
            self._reason = str(record["reason"])
        elif kind == "admission":
            self._admissions.count(record)
        elif kind == "resumed":
            self._forget(round_)

    def forget_after(self, round_: int, plans: Iterable[Record] = ()) -> None:
        """Drop later rounds from the counts, because the run was resumed at `round_`.

        Their records stay in the file. `plans`: the plans that the resume has restored.
        """
        self._forget(round_)
        self._write({"kind": "resumed", "round": round_})
        counted = None if self._account is None else self._account.resumed(round_, plans)
        if counted is not None:
            self._write(counted)

    def _forget(self, round_: int) -> None:
        self._rounds = {r: row for r, row in self._rounds.items() if r < round_}
        self._closed = {r: rows for r, rows in self._closed.items() if r < round_}
        self._evaluations = {r: v for r, v in self._evaluations.items() if r < round_}
        self._beside_loss = {r: v for r, v in self._beside_loss.items() if r < round_}
        self._tasks = {r: v for r, v in self._tasks.items() if r < round_}
        self._admissions.forget(round_)
        self._open, self._flush, self._plan, self._written = {}, {}, {}, {}
        self._reason = ""

    def report(self, site: str, round_: int, kind: str, metrics: Record) -> bool:
        """Take a site's report. Returns whether it is in the file.

        A report that is in the file already, from before a restart of the coordinator, is ignored.
        A report without the fields of its kind is left out, with a message. Raises, after it has
        written the report, `DifferentAnchorsError` if a site's anchor differs from that of most
        sites, and `TrainingError` if no anchor has a majority.
        """
        if kind == "admission":
            self._admission(site, round_, metrics)
            return self._metrics.is_written
        if kind != "warning" and (kind, site) in self._written.get(round_, ()):
            return self._metrics.is_written
        try:
            metrics = checked(kind, metrics)
        except ValueError as error:
            self.message(f"{site}, round {round_}: its report is left out: {error}")
            return False
        if kind == "warning":
            self.message(f"{site}: {metrics['text']}")
            return self._metrics.is_written
        self._written.setdefault(round_, set()).add((kind, site))
        said = {key: value for key, value in metrics.items() if key not in RESERVED}
        record = {"kind": kind, "round": round_, "site": site, **said}
        of_anchor = next((own for own, first in FIRST.items() if kind in (own, first)), None)
        if of_anchor is not None:
            after = metrics["after_round"]
            record |= {"kind": of_anchor, "step": self._step_after(after)}
            if of_anchor == "tasks":
                self._tasks[after] = _figures(record)
            else:
                self._evaluations[after] = metrics["val_loss"]
                self._beside_loss[after] = beside_loss(metrics)
            self._write(record)
            if of_anchor == "evaluation" and not math.isfinite(metrics["val_loss"]):
                self.message(f"{site}: the held-out loss {moment(after)} is not finite")
            return self._metrics.is_written
        self._write(record)
        if "dropped" in metrics:
            self.message(
                f"{site}, round {round_}: {metrics['dropped']} is not finite; the contribution is "
                "dropped, the site goes on from the anchor"
            )
        if kind == "flush":
            self._flush[site] = record
            members = self._expected(round_, self._flush)
            combine(self._flush, members)
            self._name_the_odd(round_, self._flush, members)
        elif kind == "round":
            # A late report is added to its round, even if the round was closed.
            self._open.setdefault(round_, self._closed.pop(round_, {}))[site] = record
            ready = [r for r in sorted(self._open) if r < round_]
            if len(self._open[round_]) >= self._expected(round_, self._open[round_]):
                ready.append(round_)
            for number in ready:
                self._close_round(number)
        return self._metrics.is_written

    def sync(self) -> None:
        """Return when the reports in the file survive a power cut (`Metrics.sync`)."""
        self._metrics.sync()

    def _name_the_odd(self, round_: int, rows: Mapping[str, Record], members: int) -> None:
        """Raise `DifferentAnchorsError` if some sites' anchor differs from that of most sites."""
        settled = settled_anchor(rows, members)
        # Once per round and site: a site that has joined again is not blamed for its past anchor.
        odd = [s for s in (settled[1] if settled else []) if (round_, s) not in self._odd]
        self._odd.update((round_, site) for site in odd)
        if odd:
            raise DifferentAnchorsError(
                f"round {round_}: it holds another anchor than most sites do", odd
            )

    def _expected(self, round_: int, rows: Mapping[str, Record]) -> int:
        """Return the number of sites that should report about a round.

        The round's plan gives the number. If the plan is not known, the largest number that a site
        reports counts.
        """
        claims = (int(row["members"]) for row in rows.values())
        return self._members.get(round_) or max(claims, default=0)

    def _admission(self, site: str, round_: int, verdict: Record) -> None:
        """Take the verdict about a contribution: write it if it has content, announce it if new."""
        record = self._admissions.record(site, round_, verdict)
        if record is None:
            return
        self._write(record)
        self._admissions.count(record)
        line = self._admissions.line(record)
        if line is not None:
            text, warning = line
            self.message(text) if warning else self.happened(text)

    def plan(self, plan: Record) -> None:
        """Take a new plan.

        Its settings are written if they differ from those of the plan before. If they were kept,
        the reason is written if it is a new one.
        """
        if "members" in plan:
            self._members[plan["round"]] = len(plan["members"])
            self._admissions.plan(plan)
        counted = None if self._account is None else self._account.plan(plan)
        if counted is not None:
            self._write(counted)
        if plan["kind"] == "flush":
            return
        chosen = {key: plan[key] for key in CHOSEN}
        place = {"round": plan["round"], "step": plan["first_step"]}
        if chosen != self._plan:
            self._write({"kind": "plan", **place, **chosen, "reason": plan["reason"]})
        elif plan["reason"] != self._reason:
            self._write({"kind": "plan_kept", **place, "reason": plan["reason"]})
        self._plan, self._reason = chosen, plan["reason"]

    def message(self, text: str) -> None:
        """Write a message for people."""
        self._write({"kind": "message", "text": plain(text)})

    def happened(self, text: str) -> None:
        """Write a message about a site that joined or left, or about a new phase of the run."""
        self._write({"kind": "message", "about": "members", "text": plain(text)})

    def sequences(self, counts: Mapping[str, int], problem: str) -> None:
        """Take counts of sequences from the ledger's audit for the summary.

        `problem` is a line about a fault in the ledger; empty if there is none.
        """
        self._sequences = {f"sequences_{name}": count for name, count in counts.items()}
        if problem:
            self.message(problem)

    def finish(self, phase: str, reason: str) -> Record:
        """Write `summary.json` and return its content."""
        for number in sorted(self._open):
            # The run has ended, so different anchors have no consequence any more.
            with contextlib.suppress(TrainingError):
                self._close_round(number)
        rounds = [self._rounds[number] for number in sorted(self._rounds)]
        flush = combine(self._flush, len(self._flush) + 1) if self._flush else None
        everything = [*rounds, flush] if flush else rounds
        seconds = sum(row["seconds"] for row in rounds)
        tokens = sum(row["tokens"] for row in rounds)
        config = self._config
        payload = sum(row["payload_bytes"] for row in everything)
        dense = sum(row["allreduce_bytes"] for row in everything)
        first = self._evaluations.get(-1)
        after = max(self._evaluations, default=-1)
        last = self._evaluations[after] if after >= 0 else None
        summary: Record = {
            "name": config.run.name,
            "phase": phase,
            "reason": reason,
            "method": config.outer.method,
            "sites": len(config.sites),
            "stages": config.site.stages,
            "shards": config.site.shards,
            "rounds": len(rounds),
            "steps": rounds[-1]["step"] if rounds else 0,
            "val_loss_first": first,
            "val_loss_last": last,
            **self._held_out_figures(after),
            "loss_last": rounds[-1].get("loss") if rounds else None,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "wait_share": sum(r["wait_share"] * r["seconds"] for r in rounds) / seconds
            if seconds
            else 0.0,
            "payload_bytes": payload,
            "allreduce_bytes": dense,
            "ratio_per_token": dense / payload if payload else 0.0,
            "anchor_digest": everything[-1]["anchor_digest"] if everything else None,
            **self._task_figures(),
            "admission": self._admissions.totals(),
            **_over_time(rounds),
            **self._sequences,
        }
        if self._account is not None:
            summary["privacy"] = self._account.figures()
        data = (json.dumps(finite(summary), indent=2) + "\n").encode()
        path = self._folder / "summary.json"
        when_there_is_room(lambda: replace_file(path, data), path.name)
        self._metrics.close()
        self._emit({"kind": "summary", **summary})
        return summary

    def _held_out_figures(self, after: int) -> Record:
        """Return the first and last figures beside the held-out loss; empty without any.

        `after`: round of the last evaluation.
        """
        ends = {"first": -1, "last": after} if after >= 0 else {"first": -1}
        return {
            f"{name}_{end}": value
            for end, number in ends.items()
            for name, value in self._beside_loss.get(number, {}).items()
        }

    def _task_figures(self) -> Record:
        """Return the first and the last figures of tasks; empty without any."""
        if not self._tasks:
            return {}
        first, last = min(self._tasks), max(self._tasks)
        return {"tasks_first": self._tasks[first], "tasks_last": self._tasks[last]}

    def _step_after(self, round_: int) -> int:
        """Return the inner steps by the end of `round_`, from its reports; 0 before round 0."""
        if round_ < 0:
            return 0
        if round_ in self._rounds:
            return int(self._rounds[round_]["step"])
        rows = self._open.get(round_) or self._flush
        return int(max((row["step"] for row in rows.values()), default=0))

    def _close_round(self, number: int) -> None:
        rows = self._open.pop(number)
        self._remember(number, rows)
        members = self._expected(number, rows)
        combined = {"kind": "round", **combine(rows, members)}
        self._rounds[number] = _summed(combined)
        self._write(combined)
        if (line := self._declared.line(rows.values(), self._plan)) is not None:
            self.message(line)
        self._name_the_odd(number, rows, members)

    def _remember(self, number: int, rows: dict[str, Record]) -> None:
        self._closed[number] = rows
        self._closed = {r: kept for r, kept in self._closed.items() if r > number - REMEMBERED}
        self._members = {r: n for r, n in self._members.items() if r > number - REMEMBERED}
        self._odd = {each for each in self._odd if each[0] > number - REMEMBERED}
        self._admissions.forget_lines(number - REMEMBERED)
        if len(self._written) > 2 * WRITTEN:  # Not in every round, to save time at a restart.
            self._written = {r: own for r, own in self._written.items() if r > number - WRITTEN}

    def _write(self, record: Record) -> None:
        record = {"time": round(time.time(), 3), **record}
        self._metrics.write(record)
        self._emit(record)


def _over_time(rounds: Sequence[Record]) -> Record:
    """Return `of_devices` of the whole run from its combined rounds; MFU is averaged over time."""
    found = of_devices([{k: v for k, v in row.items() if k != "mfu"} for row in rounds])
    measured = [row for row in rounds if "mfu" in row]
    spent = sum(row["seconds"] for row in measured)
    if spent:
        found["mfu"] = sum(row["mfu"] * row["seconds"] for row in measured) / spent
    return found


def _summed(record: Record) -> Record:
    """Return only the fields of a combined round that the summary needs, to save memory."""
    return {key: record[key] for key in SUMMED if key in record}


def _figures(record: Record) -> Record:
    """Return the fields of an evaluation on tasks that the summary needs."""
    return {key: record[key] for key in ("after_round", "results", "stderr", "samples")}


def _read_lines(path: Path) -> Iterator[Record]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            record = object_of(line)
            if record is not None:  # None: the run was killed while it wrote this line.
                yield record
