"""Writes tables of the quality benchmark into a Markdown document, between marks that name them.

<!-- quality: begin REGIME SITES iid|non-iid core|muon|ablations --> ... <!-- quality: end -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.quality.report import Point
from benchmarks.quality.rows import all_entries
from dilocox.config.methods import exchanges_gradients

_MARKED = re.compile(
    r"(<!-- quality: begin (\S+) (\d+) (iid|non-iid) (core|muon|ablations) -->\n)"
    r".*?(<!-- quality: end -->)",
    re.DOTALL,
)
HEAD = """\
| method | H | per transfer | in all | seeds | loss | range | gap |
|---|---|---|---|---|---|---|---|
"""
NOTHING = "Not measured yet.\n"


def filled(text: str, known: Sequence[Point]) -> str:
    """Return the document `text` with the tables of `known` in their places.

    Rows have the order of the entries, rows of ablations that of their loss. Loss and gap are means
    over the seeds; the range is that of the loss.
    """

    order = {entry.label: number for number, entry in enumerate(all_entries())}

    def table(found: re.Match[str]) -> str:
        begin, regime, sites, kind, group, end = found.groups()
        where = (regime, int(sites), kind == "iid")
        inside = [p for p in known if p.cell == where and p.group == group]
        if group == "ablations":
            inside.sort(key=lambda point: (point.loss is None, point.loss))
        else:
            inside.sort(key=lambda point: order.get(point.label, len(order)))
        lines = "".join(_line(point) for point in inside)
        return begin + (HEAD + lines if lines else NOTHING) + end

    return _MARKED.sub(table, text)


def _line(point: Point) -> str:
    reached = "diverged" if point.failed else _shown(point.loss, ".3f")
    cells = [
        point.label,
        "1" if exchanges_gradients(point.method) else _shown(point.inner_steps, ".3g"),
        _shown(point.per_transfer, ",.0f" if (point.per_transfer or 0) >= 100 else ".3g", "x"),
        _shown(point.reduction, ",.0f", "x"),
        str(point.seeds),
        reached,
        _shown(point.loss_range if point.seeds > 1 and point.loss is not None else None, ".3f"),
        _shown(None if point.gap is None else round(point.gap, 3) + 0.0, "+.1%"),  # no "-0.0%"
    ]
    return f"| {' | '.join(cells)} |\n"


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit
