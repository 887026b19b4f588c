"""Writes tables of the WAN benchmark into a Markdown document, between marks that name them.

<!-- wan: begin SITES RATIO --> ... <!-- wan: end -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.wan.grid import ALONE, BY_NAME, NONE

Row = dict[str, Any]
_MARKED = re.compile(r"(<!-- wan: begin (\d+) (\d+) -->\n)(.*?)(<!-- wan: end -->)", re.DOTALL)
HEAD = """\
| method | tokens/s | speed kept | over AllReduce | H | payload | on the wire | of the link |
|---|---|---|---|---|---|---|---|
"""
NAMES = {NONE: "no exchange", ALONE: "no exchange, the peers' loop"}
NOTHING = "Not measured yet.\n"


def filled(text: str, known: Sequence[Row]) -> str:
    """Return the document `text` with the tables of `known` in their places.

    A line above each table describes link and blocks. A table of a link without rows stays as it
    is.
    """

    def table(found: re.Match[str]) -> str:
        begin, sites, ratio, before, end = found.groups()
        inside = [r for r in known if (r["sites"], r["ratio"]) == (int(sites), int(ratio))]
        if not inside:
            return begin + (before or NOTHING) + end
        return begin + about(inside) + "\n" + HEAD + "".join(map(_line, inside)) + end

    return _MARKED.sub(table, text)


def about(inside: Sequence[Row]) -> str:
    """Return one line about the link of some rows."""
    first = inside[0]
    congestion = ", ".join(sorted({row["congestion"] for row in inside} - {"not noted"}))
    several = any(row["blocks"] > 1 for row in inside)
    return (
        f"{first['sites']} sites with {first['link']} each. Round trips take "
        f"{first['round_trip_ms']:.2f} ms and a step {first['step_ms']:.0f} ms. "
        f"Gradients in fp32 take {first['comm_to_compute']:,.0f} times as long as a step. "
        f"{f'TCP uses `{congestion}`. ' if congestion else ''}A figure is one measurement"
        f"{', with an interval the median of several' if several else ''}.\n"
    )


def _line(row: Row) -> str:
    method = row["method"]
    peer = method in BY_NAME and BY_NAME[method].kind == "peer"
    name = NAMES.get(method, f"{method} (peer)" if peer else method)
    cells = [
        name,
        f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] >= 100
        else f"{row['tokens_per_second']:.1f}",
        _share(row),
        _shown(row["speedup_vs_allreduce"], ",.0f", "x"),
        _shown(row["inner_steps"], ".0f") if method in BY_NAME else "",
        _size(row["payload_bytes"]) if method in BY_NAME else "",
        _size(row["wire_bytes"]) if method in BY_NAME else "",
        _shown(row["efficiency"], ".0%"),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _share(row: Row) -> str:
    share, low, high = (row[f"share_of_no_network{end}"] for end in ("", "_low", "_high"))
    if row["method"] not in BY_NAME or share is None:
        return ""
    form = ".2%" if share < 0.1 else ".1%"
    return f"{share:{form}}" + (f" ({low:{form}} to {high:{form}})" if low is not None else "")


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def _size(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e6:,.2f} MB" if value >= 1e6 else f"{value / 1e3:,.1f} kB"
