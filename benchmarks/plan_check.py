"""The planner's predictions against what was measured on shaped links.

Measured are the rows of `benchmarks/results/overlap-cpu.json` (two sites on one core each, a link
of 4.5 Mbit/s): tokens/s by overlap rule, each against the same sites with no exchange between them.
The planner is given the run file, the link and the time of a step without exchange, nothing else.
Its two constants of an exchange (`exchange_ms`, `exchange_cpu_ms` of the planner's table) were set
by these same rows: of the times it is a fit, of payloads and of what hides behind what a check.
Printed: predicted over measured, the median error and the worst.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import overlap

import dilocox
from dilocox.plan.predict import predict
from dilocox.plan.table import Device, Link, Table

RESULTS = Path(__file__).parent / "results" / "overlap-cpu.json"


def processor(cores: float, table: Table) -> Device:
    """A site without GPUs, of so many cores; its speed is told by the step's time."""
    some = table.device(table.devices[0])
    return replace(some, name="processor", shared=True, cores=cores)


def check_overlap(measured: dict[str, Any], table: Table) -> list[common.Row]:
    """Predicted and measured tokens/s for every overlap rule of the results."""
    rows, settings = measured["rows"], measured["settings"]
    alone = next(row for row in rows if row["overlap"] == "alone")
    rate = settings["link_bits_per_second"] / 8
    link = Link(rate, rate)
    device = processor(settings["cores_per_site"], table)
    compared: list[common.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            if row is alone:
                continue
            setting = overlap.Setting(row["overlap"], row["delay_slots"])
            path = overlap.run_file(Path(folder), setting.name, setting, overlap.SITES, rounds=10)
            found = predict(
                dilocox.load_run(path),
                device,
                link,
                list(overlap.SITES),
                step_seconds=alone["round_seconds"] / settings["inner_steps"],
                at_once=1,  # as the engine that made these rows carried them
            )
            compared.append(
                {
                    "run": setting.name,
                    "measured": row["tokens_per_second"],
                    "predicted": found.tokens_per_second,
                    "ratio": found.tokens_per_second / row["tokens_per_second"],
                    "measured_waited": row["wait_share"],
                    "predicted_waited": found.waited_share,
                    "measured_payload": row["payload_bytes"],
                    "predicted_payload": found.payload_bytes,
                }
            )
    return compared


def errors(rows: Sequence[common.Row]) -> tuple[float, float]:
    """Median and worst distance of predicted over measured from 1."""
    found = [abs(row["ratio"] - 1) for row in rows]
    return statistics.median(found), max(found)


def main() -> int:
    """Predict, compare, print, write."""
    options = common.parser(__doc__ or "").parse_args()
    rows = check_overlap(json.loads(RESULTS.read_text(encoding="utf-8")), Table.load())
    share: Callable[[Any], str] = lambda value: f"{value:.1%}"  # noqa: E731
    print(common.table(rows, {
        "run": "s", "measured": ",.0f", "predicted": ",.0f", "ratio": ".3f",
        "measured_waited": share, "predicted_waited": share,
        "measured_payload": ",d", "predicted_payload": ",d",
    }))  # fmt: skip
    median, worst = errors(rows)
    print(f"median error {median:.1%}, worst {worst:.1%}")
    if options.json:
        common.write_json(options.json, "plan_check", common.machine(),
                          {"against": RESULTS.name}, rows)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
