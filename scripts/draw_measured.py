"""Draws all pictures of committed results: loss against bytes, speed on slow links, scaling.
Writes the table of the GPU runs in docs/measured.md.

python scripts/draw_measured.py           writes the pictures and docs/measured.md
python scripts/draw_measured.py --check   says whether they are up to date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import tables  # noqa: E402
from benchmarks.quality import plot as quality_plot  # noqa: E402
from benchmarks.quality import report as quality_report  # noqa: E402
from benchmarks.quality.rows import LEAD  # noqa: E402
from benchmarks.scaling import plot as scaling_plot  # noqa: E402
from benchmarks.wan import plot as wan_plot  # noqa: E402
from benchmarks.wan.grid import RATIO  # noqa: E402

SITES = 2
"""Number of sites in the picture of speed: all methods and peers were measured at it."""


def pictures() -> dict[Path, str]:
    """Return the expected content of each file."""
    docs, results = ROOT / "docs", ROOT / "benchmarks" / "results"
    points = quality_report.points(_rows("quality-cpu"))
    lead = [point for point in points if point.cell == LEAD]
    links = _rows("wan-cpu")
    slow = [row for row in links if (row["sites"], row["ratio"]) == (SITES, RATIO)]
    measured = docs / "measured.md"
    return {
        measured: tables.filled(measured.read_text(encoding="utf-8"), tables.committed()),
        docs / "loss.svg": quality_plot.picture(lead),
        docs / "speed.svg": wan_plot.picture(slow),
        docs / "scaling.svg": scaling_plot.picture(_rows("scaling")),
        results / "quality-cpu.svg": quality_plot.picture(points),
        results / "wan-cpu.svg": wan_plot.picture(links),
    }


def _rows(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def main() -> int:
    """Write the files, or check them. Returns exit code 1 if a file is out of date."""
    if "--check" not in sys.argv[1:]:
        for path, text in pictures().items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in pictures().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date: run python scripts/draw_measured.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
