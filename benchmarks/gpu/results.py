"""The result file of the acceptance run: a head, one row per check, and the table at the end."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, Aim, Part

Row = dict[str, Any]
PASS, FAIL, INFO, LEFT_OUT = "PASS", "FAIL", "INFO", "LEFT OUT"
SAME = ("gpu", "driver", "python", "torch", "cuda", "nccl", "transformers", "scale")
"""Facts of the head that all rows of a file must have in common."""


def today() -> str:
    """Return the date in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def is_done(row: Row | None) -> bool:
    """Return whether a later call may skip the row: it passed, or it has figures.

    A row that lacks the figure of an aim is not done, because nobody knows whether the aim is met.
    """
    if row is None:
        return False
    if row["verdict"] == PASS:
        return True
    aimed = all(aim["figure"] in row["figures"] for aim in row.get("aims", ()))
    return row["verdict"] == INFO and bool(row["figures"]) and aimed


def judged(aims: Sequence[Aim], figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every aim as data: figure, aim, and whether the aim is met."""
    return [
        {"figure": a.figure, "aim": f"{a.sign} {a.value:g}", "met": a.met(figures)} for a in aims
    ]


class Results:
    """The rows measured so far. Every change rewrites the file as a whole, atomically.

    Raises `SystemExit` for a file of another benchmark.
    """

    def __init__(self, path: Path | None, command: str, commit: str | None) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}
        self._command = command
        self._commit = commit
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.get("benchmark") != "gpu":
                raise SystemExit(f"{path}: not a result of this benchmark; name another file")
            self.head = found["machine"]
            self.rows = {row["name"]: row for row in found["rows"]}

    def set_head(self, head: Mapping[str, Any]) -> None:
        """Set the facts of this machine. Raises `SystemExit` if the file is of another machine."""
        for fact in SAME if self.head else ():
            if self.head.get(fact) != head.get(fact):
                raise SystemExit(
                    f"{self.path}: has rows with {fact} {self.head.get(fact)}, here it is "
                    f"{head.get(fact)}; name another file by --json"
                )
        self.head = dict(head)
        self._write()

    @property
    def on_gpu(self) -> bool:
        """Whether the rows were measured on a GPU."""
        return bool(self.head.get("gpu"))

    def add(self, part: Part, row: Row) -> Row:
        """Add a measured row: `name`, `verdict`, `message`, `figures`, `seconds`.

        A row that a call leaves out does not replace an earlier measurement.
        """
        name = row["name"]
        if row["verdict"] == LEFT_OUT and name in self.rows:
            return self.rows[name]
        aims = part.aims_of(name) if self.on_gpu and row["verdict"] != LEFT_OUT else []
        made = {
            "part": part.name,
            **row,
            "aims": judged(aims, row["figures"]),
            "commit": self._commit,
            "date": today(),
        }
        self.rows[name] = made
        self._write()
        return made

    def _write(self) -> None:
        if self.path is None:
            return
        order = {name: at for at, name in enumerate(r for part in PARTS for r in part.rows)}
        content = {
            "benchmark": "gpu",
            "command": self._command,
            "date": today(),
            "machine": self.head,
            "rows": sorted(self.rows.values(), key=lambda r: order.get(r["name"], len(order))),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(part, self.path)


def shown(value: object) -> str:
    """Return a figure in four digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def aims_text(row: Row) -> str:
    """Return the aims of a row for one cell; empty without aims."""
    told = []
    for aim in row["aims"]:
        figure = shown(row["figures"].get(aim["figure"], "not measured"))
        told.append(
            f"{aim['figure']} {figure}, aim {aim['aim']}: {'met' if aim['met'] else 'MISSED'}"
        )
    return "; ".join(told)


def table(rows: Iterable[Row]) -> str:
    """Return the rows as text: verdict, name, seconds, message, figures and aims."""
    lines = []
    for row in rows:
        figures = ", ".join(f"{key} {shown(value)}" for key, value in row["figures"].items())
        parts = [text for text in (row["message"], figures, aims_text(row)) if text]
        lines.append(
            f"{row['verdict']:8}  {row['name']:32}  {row['seconds']:6.1f} s  {' | '.join(parts)}"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Return one line: how many rows have each verdict, and how many aims are met."""
    counts = {v: sum(row["verdict"] == v for row in rows) for v in (PASS, FAIL, INFO, LEFT_OUT)}
    aims = [aim for row in rows for aim in row["aims"]]
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    met = f"{sum(a['met'] for a in aims)} of {len(aims)} aims met" if aims else "no aims judged"
    return f"{told or 'no rows'}; {met}"
