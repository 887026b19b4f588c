"""Repeats two cells of a published grid: DiLoCo over slow links, and dilocox on the same links.

The project diloco-measured (github.com/Adnan082/diloco-measured, August 2026) trained 30.8M
parameters at four sites with a GPU each, over shaped links. It reports the share of the time in
which sites compute. DiLoCo with rounds of 128 steps has 71.5 % at 1 Gbit/s and 36.1 % at 200
Mbit/s. By its own account fp32 gradients cross these links in 40 and 200 times the time of a step.

Here four hosts of a lab (`dilocox.tools.testbed`) have links of the same two ratios, made for the
speed of this machine. In every block all sites train without exchange, then with DiLoCo, then with
dilocox. `share` is the speed of a method over the speed without exchange in the same block, as
median with a bootstrap interval. The first round of DiLoCo and the first half of the steps of
dilocox, in which it measures the link, do not count. Loss is not measured here; the last lines have
the predicted loss of each plan of dilocox.

Three blocks take about 30 minutes on two cores; --quick makes one block of shorter runs. Every
measurement is written when it is done. Started again with the same --json, the benchmark goes on.
It needs Linux, root, iproute2 and control groups; without them it prints one line and exits with
code 3.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.wan import run as wan_run
from benchmarks.wan.grid import CONGESTION, SITES, VOCABULARY, Settings, link_of
from benchmarks.wan.rows import TOKENS, interval
from dilocox.errors import DilocoxError
from dilocox.models import count_parameters, load_model_config
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.testbed import unsupported_reason

Row = dict[str, Any]
NAME = "published_grid"
NONE, DILOCO, DILOCOX = "none", "diloco", "dilocox"
METHODS = (NONE, DILOCO, DILOCOX)
INNER_STEPS = 128
BLOCKS = 3
DILOCO_ROUNDS, DILOCOX_STEPS = 4, 1200
QUICK_ROUNDS, QUICK_STEPS = 2, 400


@dataclass(frozen=True)
class Cell:
    """A link of the published grid."""

    published_link: str
    ratio: float
    """Time in which fp32 gradients cross the link, over the time of a step."""
    published_share: float
    """Published share of the time in which DiLoCo computes, with rounds of `INNER_STEPS`."""


CELLS = (Cell("1 Gbit/s", 40.0, 0.7152), Cell("200 Mbit/s", 200.0, 0.3609))
"""experiments/01_cu_grid/NOTES.md there. A ratio follows from the bandwidth at which the page
computes a share of 75 %: 937 Mbit/s, where an exchange takes 128/3 steps."""


def settings_of(method: str) -> Settings:
    """Return the keys of the run file of a method."""
    if method == DILOCOX:
        return {"outer.method": "dilocox"}
    return {
        "outer.method": "diloco",
        "outer.inner_steps": INNER_STEPS,
        "outer.exchange": "reduce",
    }


def order(block: int) -> Sequence[str]:
    """Return the methods in the order in which a block measures them."""
    return METHODS if block % 2 == 0 else METHODS[::-1]


def rows(runs: Sequence[Row]) -> list[Row]:
    """Return one row per link and method, from one measurement per block."""
    found = []
    for cell in CELLS:
        inside = [run for run in runs if run["published_link"] == cell.published_link]
        without = {r["block"]: r["tokens_per_second"] for r in inside if r["method"] == NONE}
        for method in (DILOCO, DILOCOX):
            own = [r for r in inside if r["method"] == method and r["block"] in without]
            if not own:
                continue
            shares = [run["tokens_per_second"] / without[run["block"]] for run in own]
            found.append(
                {
                    "published_link": cell.published_link,
                    "ratio": cell.ratio,
                    "method": method,
                    "published": cell.published_share if method == DILOCO else None,
                    **interval("share", shares, 4),
                    "inner_steps": statistics.median(run["inner_steps"] for run in own),
                    "payload_bytes": round(statistics.median(r["payload_bytes"] for r in own)),
                    "blocks": len(own),
                }
            )
    return found


def table(runs: Sequence[Row]) -> str:
    """Return the rows, and the plans of dilocox, as text."""
    shown = common.table(
        rows(runs),
        {
            "published_link": "s",
            "ratio": ",.0f",
            "method": "s",
            "published": ".1%",
            "share": ".1%",
            "share_low": ".1%",
            "share_high": ".1%",
            "inner_steps": ",.0f",
            "payload_bytes": ",d",
            "blocks": "d",
        },
    )
    plans = [
        f"- {run['published_link']}, block {run['block']}: {run['plan']}: {run['reason']}"
        for run in runs
        if run["method"] == DILOCOX
    ]
    return "\n".join([shown, *plans])


class Bench:
    """One call of the benchmark: its measurements and the file for them."""

    def __init__(self, folder: Path, path: Path | None, quick: bool) -> None:
        self._folder = folder
        self._quick = quick
        self._path = path
        self._settings = {
            "tokens_per_step": TOKENS,
            "diloco_rounds": QUICK_ROUNDS if quick else DILOCO_ROUNDS,
            "dilocox_steps": QUICK_STEPS if quick else DILOCOX_STEPS,
        }
        self._runs: list[Row] = common.read_rows(path, NAME, self._settings)
        config = wan_run.configuration(folder, len(SITES), {}, 1)
        model = load_model_config(config.model, VOCABULARY)
        self._parameters = int(count_parameters(model))

    @property
    def runs(self) -> Sequence[Row]:
        """The measurements so far."""
        return self._runs

    def measure(self) -> None:
        """Make the missing measurements. Raises `DilocoxError`."""
        on = common.machine()
        if self._runs:
            common.refuse_other_machine(self._path, on)
        with Lab(list(SITES)) as lab:
            lab.network.congest(CONGESTION)
            for block in range(1 if self._quick else BLOCKS):
                for cell in CELLS:
                    missing = [m for m in order(block) if not self._has(cell, m, block)]
                    if missing:
                        rate = link_of(
                            cell.ratio, self._parameters, len(SITES), self._step_seconds(lab)
                        )
                        lab.shape(f"{rate / 1e3:.3f}kbit")
                    for method in missing:
                        self._runs.append(self._measured(lab, cell, method, block))
                        self._write(on)

    def _has(self, cell: Cell, method: str, block: int) -> bool:
        key = (cell.published_link, method, block)
        return any((r["published_link"], r["method"], r["block"]) == key for r in self._runs)

    def _step_seconds(self, lab: Lab) -> float:
        """Return the seconds of a step without exchange: of all measurements, or of a new one."""
        known = [run["tokens_per_second"] for run in self._runs if run["method"] == NONE]
        if known:
            return TOKENS / float(statistics.median(known))
        common.say("measuring the time of a step")
        found = wan_run.measure_none(lab, self._folder, 2, 50)
        return TOKENS / float(found["tokens_per_second"])

    def _measured(self, lab: Lab, cell: Cell, method: str, block: int) -> Row:
        if method == NONE:
            found = wan_run.measure_none(lab, self._folder)
        elif method == DILOCO:
            steps = INNER_STEPS * int(self._settings["diloco_rounds"])
            found = wan_run.measure_run(lab, self._folder, settings_of(method), steps, warm_up=1)
        else:
            steps = int(self._settings["dilocox_steps"])
            found = wan_run.measure_run(lab, self._folder, settings_of(method), steps)
        links = [link.bits_per_second for link in lab.verify().links]
        common.say(
            f"{cell.published_link}, block {block}, {method}: "
            f"{found['tokens_per_second']:,.0f} tokens/s"
        )
        return {
            "published_link": cell.published_link,
            "ratio": cell.ratio,
            "method": method,
            "block": block,
            "link_bits_per_second": round(statistics.fmean(links)),
            **found,
            "commit": common.commit(),
            "date": common.today(),
        }

    def _write(self, on: dict[str, Any]) -> None:
        if self._path is not None:
            common.write_json(self._path, NAME, on, self._settings, self._runs)


def main() -> int:
    """Measure what is missing and print. Returns the exit code."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    if common.cannot(NAME, unsupported_reason()):
        return common.CANNOT
    with tempfile.TemporaryDirectory(prefix="dilocox-published-grid-") as temporary:
        bench = Bench(Path(temporary).resolve(), options.json, options.quick)
        try:
            bench.measure()
        except DilocoxError as error:
            common.say(f"{NAME}: {error}")
            return 1
        finally:
            print(table(bench.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
