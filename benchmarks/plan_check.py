"""Compares the planner's predictions with measurements on shaped links.

The planner gets only the run file, the link, and the time of a step without exchange.

- `benchmarks/results/overlap-cpu.json` (two sites on one core each, a link of 4.5 Mbit/s): tokens/s
  by overlap rule. The planner's two constants of an exchange (`exchange_ms`, `exchange_cpu_ms` of
  its table) were fitted to these rows. So the times are a fit; payloads and overlap are a check.
- `benchmarks/results/wan-cpu.json` (of `benchmarks.wan`; another file with `--wan FILE`): every
  method of the engine at every link and number of sites. Nothing was fitted to these rows.

It prints predicted over measured speed, and the median and largest error of each file.
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

import dilocox
from benchmarks import common, overlap
from benchmarks.wan import grid as wan_grid
from benchmarks.wan import rows as wan_rows
from benchmarks.wan import run as wan_run
from dilocox.config.run_config import RunConfig
from dilocox.tools.planner.hardware_table import Device, HardwareTable, Link
from dilocox.tools.planner.predict import Simulation, predict

RESULTS = common.RESULTS / "overlap-cpu.json"
WAN = common.RESULTS / "wan-cpu.json"
ROUNDS, ROUNDS_CHOSEN = 12, 60
"""Simulated rounds: if the run file sets the length of rounds, and if the controller chooses it."""


def processor(cores: float, table: HardwareTable) -> Device:
    """Return a site without GPUs, with `cores` cores. Its speed comes from the time of a step."""
    some = table.device(table.devices[0])
    return replace(some, name="processor", shared=True, cores=cores)


def check_overlap(measured: dict[str, Any], table: HardwareTable) -> list[common.Row]:
    """Return predicted and measured tokens/s for every overlap rule of the results."""
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
            # The engine that made these rows had no shared moments and one exchange at a time.
            run = dilocox.load_run(path, ["compression.moments=false"])
            found = predict(
                run,
                device,
                link,
                list(overlap.SITES),
                step_seconds=alone["round_seconds"] / settings["inner_steps"],
                simulation=Simulation(at_once=1),
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


def check_wan(measured: dict[str, Any], table: HardwareTable) -> list[common.Row]:
    """Return predicted and measured tokens/s of the engine's methods.

    `measured`: a result file of `benchmarks.wan`, or its file of single measurements.
    """
    settings = measured["settings"]
    extent = replace(wan_grid.FULL, **settings["extent"])
    cores = settings["quota_of_machine"] * measured["machine"]["cores"]
    compared = []
    rows = measured["rows"]
    if measured["benchmark"] == "wan-runs":
        rows = wan_rows.rows(rows, settings["parameters"])
    for row in rows:
        method = wan_grid.BY_NAME.get(row["method"])
        if method is None or method.kind != "engine":
            continue
        step = row["step_ms"] / 1000
        sites = row["sites"]
        bits = wan_grid.synchronous_bits(settings["parameters"], sites)
        rate = bits / (row["comm_to_compute"] * step)
        _, steps = wan_run.extent_of(method, row["ratio"], extent)
        run = wan_run.configuration(
            Path("wan"), sites, wan_run.engine_settings(method, sites), steps, rate
        )
        name = f"{method.name}, {sites} sites, {row['comm_to_compute']:,.0f}x"
        compared.append(compare(name, run, row, rate, step, cores / sites, table))
    return compared


def compare(
    name: str,
    run: RunConfig,
    measured: common.Row,
    link: float,
    step: float,
    cores: float,
    table: HardwareTable,
    rtt: float = 0.0,
) -> common.Row:
    """Return a row of predicted and measured speed.

    `link` is in bits per second, `step` and `rtt` in seconds, `cores` per site. `measured`: a row
    of `benchmarks.wan.run.engine_row`.
    """
    found = predict(
        run,
        processor(cores, table),
        Link(link / 8, link / 8, rtt),
        list(run.sites),
        step_seconds=step,
        simulation=Simulation(ROUNDS_CHOSEN if run.control.adapt == "link" else ROUNDS),
    )
    # The prediction is time lost by training; the measurement is processor time.
    processor_share = min(1.0, cores / run.site.ranks)
    return {
        "run": name,
        "measured": measured["tokens_per_second"],
        "predicted": found.tokens_per_second,
        "ratio": found.tokens_per_second / measured["tokens_per_second"],
        "measured_waited": measured["wait_share"],
        "predicted_waited": found.waited_share,
        "measured_payload": round(measured["payload_bytes"]),
        "predicted_payload": found.payload_bytes,
        "measured_work": measured.get("work_share"),
        "predicted_work": processor_share * found.work_seconds / found.round_seconds,
        "predicted_plan": wan_run.plan_text(vars(found.choice)),
    }


def errors(rows: Sequence[common.Row]) -> tuple[float, float]:
    """Return the median and the largest distance from 1 of the ratios predicted / measured."""
    found = [abs(row["ratio"] - 1) for row in rows]
    return statistics.median(found), max(found)


def show(rows: Sequence[common.Row]) -> None:
    """Print rows and their errors."""
    share: Callable[[Any], str] = lambda value: f"{value:.1%}"  # noqa: E731
    print(common.table(rows, {
        "run": "s", "measured": ",.1f", "predicted": ",.1f", "ratio": ".3f",
        "measured_waited": share, "predicted_waited": share,
        "measured_payload": ",d", "predicted_payload": ",d",
        "measured_work": share, "predicted_work": share, "predicted_plan": str,
    }))  # fmt: skip
    median, worst = errors(rows)
    print(f"{len(rows)} rows: median error {median:.1%}, worst {worst:.1%}")


def main() -> int:
    """Predict, compare, print and write. Returns the exit code."""
    parser = common.parser(__doc__ or "", quick=False)
    parser.add_argument(
        "--wan", type=Path, metavar="FILE", help=f"rows of benchmarks.wan ({WAN.name})"
    )
    options = parser.parse_args()
    wan = options.wan or (WAN if WAN.exists() else None)
    # By its name, the file has rows or single measurements (`benchmarks.wan.command.runs_file`).
    kind = "wan-runs" if wan is not None and wan.stem.endswith("-runs") else "wan"
    known = None if wan is None else common.read_results(wan, kind)
    table = HardwareTable.load()
    rows = check_overlap(json.loads(RESULTS.read_text(encoding="utf-8")), table)
    show(rows)
    against = [RESULTS.name]
    if wan is not None and known is not None:
        of_wan = check_wan(known, table)
        show(of_wan)
        rows += of_wan
        against.append(wan.name)
    if options.json:
        common.write_json(options.json, "plan_check", common.machine(),
                          {"against": ", ".join(against)}, rows)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
