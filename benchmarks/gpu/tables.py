"""The table of the GPU runs in docs/measured.md, from benchmarks/results/gpu-*.json.

<!-- gpu: begin --> ... <!-- gpu: end -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import Row, aims_text, shown, summary

RESULTS = Path(__file__).parents[1] / "results"
NOTHING = "No run on a GPU exists yet: nothing of dilocox has been measured on one.\n"
HEAD = "| check | verdict | figures | aims |\n|---|---|---|---|\n"
SHOWN = 4
"""Figures of a row in the table. The result file has all figures."""
_MARKED = re.compile(r"(<!-- gpu: begin -->\n).*?(<!-- gpu: end -->)", re.DOTALL)


def committed() -> list[dict[str, Any]]:
    """Return the contents of the committed result files, by name."""
    files = sorted(RESULTS.glob("gpu-*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def filled(text: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the document `text` with one table for each result between the marks."""
    tables = "\n".join(_table(each) for each in results) if results else NOTHING
    return _MARKED.sub(lambda found: found.group(1) + tables + found.group(2), text)


def _table(result: dict[str, Any]) -> str:
    order = {name: at for at, name in enumerate(row for part in PARTS for row in part.rows)}
    rows = [row for row in result["rows"] if row["name"] != "machine"]
    rows.sort(key=lambda row: order.get(row["name"], len(order)))
    return f"{_about(result, rows)}\n{HEAD}{''.join(map(_line, rows))}"


def _about(result: dict[str, Any], rows: Sequence[Row]) -> str:
    on = result["machine"]
    commits = ", ".join(sorted({str(row["commit"]) for row in rows}))
    return (
        f"{on['gpu'] or 'no GPU'}, driver {on['driver']}, PyTorch {on['torch']}, "
        f"CUDA {on['cuda']}, NCCL {on['nccl']}, transformers {on['transformers']}, "
        f"{result['date']}, commit {commits}. {summary(rows)}.\n"
    )


def _line(row: Row) -> str:
    figures = [f"{k.replace('_', ' ')} {shown(v)}" for k, v in row["figures"].items()][:SHOWN]
    told = row["verdict"] in ("PASS", "INFO") and figures
    said = "; ".join(figures) if told else " ".join(row["message"].split())
    cells = [row["name"], row["verdict"], said, aims_text(row).replace("_", " ")]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"
