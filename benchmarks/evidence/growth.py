"""Whether the gap to synchronous training grows with length or size (PROTOCOL.md, questions 2, 3).

Pure: everything follows from the results of the cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import common
from benchmarks.evidence.cells import BASELINE, MIDDLE, Cell, Source
from benchmarks.evidence.report import MARGIN, Result

AXES = {"tokens": "tokens per parameter", "ladder": "parameters"}
"""What the gap is compared over, by question."""


@dataclass(frozen=True)
class Growth:
    """The gaps of one method on one text, over lengths or sizes."""

    source: Source
    label: str
    gaps: Mapping[int, Mapping[float, float]]
    """Gaps of a seed, by tokens per parameter or by parameters. Each seed has two or more."""

    @property
    def slopes(self) -> Mapping[int, float]:
        """Change of the gap per tenfold length or size, by seed: a fit by least squares."""
        return {
            seed: statistics.linear_regression(
                [math.log10(at) for at in known], list(known.values())
            ).slope
            for seed, known in self.gaps.items()
        }

    @property
    def change(self) -> float:
        """Gap at the largest value of a seed less that at its smallest, as a mean of seeds."""
        return statistics.fmean(
            known[max(known)] - known[min(known)] for known in self.gaps.values()
        )

    @property
    def grows(self) -> bool:
        """Whether all seeds have positive slopes and the gap rises by more than `MARGIN`."""
        return min(self.slopes.values()) > 0 and self.change > MARGIN


def growths(
    results: Sequence[Result], question: str, parameters: Mapping[str, int]
) -> list[Growth]:
    """Return the growth of each method and text of a question that has two values to compare.

    `parameters`: number of parameters by the name of a size. The ladder begins with the cell of
    its text that the question of tokens has at the same length.
    """
    found: dict[tuple[Source, str], dict[int, dict[float, float]]] = {}
    for result in results:
        if result.label == BASELINE or not _is_asked(result.cell, question):
            continue
        cell = result.cell
        at = cell.per_parameter if question == "tokens" else parameters.get(cell.size)
        if at is None:
            continue
        for seed, gap in result.gaps.items():
            by_seed = found.setdefault((cell.source, result.label), {})
            by_seed.setdefault(seed, {})[float(at)] = gap
    made = []
    for (source, label), by_seed in found.items():
        known = {seed: gaps for seed, gaps in by_seed.items() if len(gaps) > 1}
        if known:
            made.append(Growth(source, label, known))
    return made


def _is_asked(cell: Cell, question: str) -> bool:
    if question == "ladder" and cell.question == "tokens":
        return cell.source == "source" and cell.per_parameter == MIDDLE
    return cell.question == question


def table(known: Sequence[Growth]) -> str:
    """Return growths as text, one line each."""
    lines = []
    for each in known:
        slopes = each.slopes
        values = sorted({at for gaps in each.gaps.values() for at in gaps})
        lines.append(
            {
                "text": each.source,
                "method": each.label,
                "values": f"{values[0]:,.0f} to {values[-1]:,.0f}",
                "per tenfold": statistics.fmean(slopes.values()),
                "seeds": f"{min(slopes.values()):+.1%} to {max(slopes.values()):+.1%}",
                "change": each.change,
                "verdict": "grows" if each.grows else "growth not shown",
            }
        )
    columns = {
        "text": "s", "method": "s", "values": "s", "per tenfold": "+.2%", "seeds": "s",
        "change": "+.2%", "verdict": "s",
    }  # fmt: skip
    return common.table(lines, columns)
