"""Compares the scaling simulation with runs in a lab, at two and at four sites.

The same runs are made in a lab (`dilocox.tools.testbed`: shaped links, hard CPU quotas) and in the
simulation of `benchmarks.scaling`. The simulation gets the run file, the link, and the step time
without exchange, measured before and after. One constant was fitted to these runs: the factor on
processor time of exchanges on cores that train (`SHARED_WORK`), on which plans depend.

- `waits`: sites wait for the exchange at each round's end; 8-bit payloads go to all sites;
- `waits, reduce`: the same, averaged in parts;
- `hides`: `dilocox` with a fixed plan: 4 bits, four fragments, a delay of half a round;
- `chooses`: `dilocox` with its defaults; its controller measures the link.

With more sites, `gather` sends more over the same link, and `reduce` hardly more: the comparison
tests this. It prints predicted over measured speed, and the median and largest error. It takes
about six minutes on two idle cores, half of that with --quick. It has the needs of `dilocox lab`.
If these are not met, it prints one line and exits with code 3. --again simulates the runs of a
results file again, with the current simulation, and measures nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common, plan_check
from benchmarks.wan import run as wan_run
from benchmarks.wan.grid import SITES, Settings, link_of, synchronous_bits
from benchmarks.wan.rows import TOKENS
from dilocox.errors import DilocoxError
from dilocox.models import count_parameters, load_model_config
from dilocox.tools.planner.hardware_table import HardwareTable
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.testbed import unsupported_reason

RESULTS = common.RESULTS / "scaling_check-cpu.json"
RATIO = 40
"""Time of a synchronous exchange over that of a step. Exchanges of 8 bits then take a third of a
round of 20 steps at two sites, half of it at four."""
ROUND = 20
ALONE_ROUNDS, ALONE_STEPS = 3, 60
LIMIT = 600.0
"""Seconds after which a run is aborted."""
MOST = 0.9
"""Share of the machine that all sites together have."""


@dataclass(frozen=True)
class Case:
    """A run that is measured in a lab and simulated."""

    name: str
    steps: int
    settings: Settings = field(default_factory=dict)


WAITS: Settings = {
    "outer.method": "diloco",
    "outer.inner_steps": ROUND,
    "compression.codec": "int8",
    "compression.error_feedback": True,
}
CASES = (
    Case("waits", 8 * ROUND, WAITS),
    Case("waits, reduce", 8 * ROUND, {**WAITS, "outer.exchange": "reduce"}),
    Case(
        "hides",
        8 * ROUND,
        {
            "outer.inner_steps": ROUND,
            "outer.slots": 4,
            "outer.delay": 2,
            "compression.codec": "int4",
            "control.adapt": "off",
        },
    ),
    Case("chooses", 20 * ROUND),
)
QUICK = ("waits", "hides")


def measure(
    sites: int, cases: tuple[Case, ...], folder: Path, table: HardwareTable
) -> list[common.Row]:
    """Run all cases with `sites` sites in a lab, and simulate them. Returns the rows.

    Raises `LabError`.
    """
    names = list(SITES[:sites])
    parameters = parameters_of(folder)
    with Lab(names) as lab:
        common.say(f"{sites} sites: measuring the time of a step")
        speeds = [alone(lab, folder)]
        rate = link_of(RATIO, parameters, sites, TOKENS / speeds[0])
        lab.shape(f"{rate / 1e3:.3f}kbit")
        found = []
        for case in cases:
            found.append(wan_run.measure_run(lab, folder, case.settings, case.steps, limit=LIMIT))
            speed = found[-1]["tokens_per_second"]
            common.say(f"{sites} sites, {case.name}: {speed:,.0f} tokens/s")
        checked = lab.verify()
        rtt, cores = checked.round_trip, lab.quota
        rate = sum(link.bits_per_second for link in checked.links) / len(checked.links)
        speeds.append(alone(lab, folder))
    step = TOKENS / (sum(speeds) / len(speeds))
    rows = []
    for case, measured in zip(cases, found, strict=True):
        run = wan_run.configuration(folder, sites, case.settings, case.steps, rate)
        name = f"{case.name}, {sites} sites"
        row = plan_check.compare(name, run, measured, rate, step, cores, table, rtt)
        rows.append(
            {
                "sites": sites,
                **row,
                "cores": cores,
                "link_bits_per_second": round(rate),
                "comm_to_compute": round(synchronous_bits(parameters, sites) / rate / step, 1),
                "step_ms": round(1000 * step, 2),
                "step_drift": round(speeds[-1] / speeds[0] - 1, 4),
                "round_trip_ms": round(1000 * rtt, 2),
                "plan": measured["plan"],
            }
        )
    return rows


def played_again(known: Mapping[str, Any], table: HardwareTable) -> list[common.Row]:
    """Return the rows of a results file, with new predictions by the current simulation."""
    cases, rows = {case.name: case for case in CASES}, []
    with tempfile.TemporaryDirectory(prefix="dilocox-scaling-") as folder:
        for row in known["rows"]:
            case, rate = cases[row["run"].rpartition(", ")[0]], row["link_bits_per_second"]
            run = wan_run.configuration(Path(folder), row["sites"], case.settings, case.steps, rate)
            measured = {
                "tokens_per_second": row["measured"],
                "wait_share": row["measured_waited"],
                "payload_bytes": row["measured_payload"],
                "work_share": row["measured_work"],
            }
            step, rtt = row["step_ms"] / 1000, row["round_trip_ms"] / 1000
            cores = row["cores"]
            found = plan_check.compare(row["run"], run, measured, rate, step, cores, table, rtt)
            rows.append({**row, **found})
    return rows


def alone(lab: Lab, folder: Path) -> float:
    """Return the tokens per second of all sites together without exchanges."""
    found = wan_run.measure_none(lab, folder, ALONE_ROUNDS, ALONE_STEPS)
    return float(found["tokens_per_second"])


def parameters_of(folder: Path) -> int:
    """Return the number of parameters of the benchmark's model."""
    run = wan_run.configuration(folder, 2, {}, 1)
    return int(count_parameters(load_model_config(run.model, run.data.vocabulary_size)))


def main() -> int:
    """Measure, predict, print, write."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--again", type=Path, metavar="FILE", help="play its runs anew")
    options = parser.parse_args()
    common.end_on_signals()
    if options.again is not None:
        known = common.read_results(options.again, "scaling_check")
        rows = played_again(known, HardwareTable.load())
        plan_check.show(rows)
        if options.json:
            common.write_json(
                options.json, "scaling_check", known["machine"], known["settings"], rows
            )
        return 0
    if common.cannot("scaling_check", unsupported_reason()):
        return common.CANNOT
    on, table = common.machine(), HardwareTable.load()
    cases = tuple(case for case in CASES if not options.quick or case.name in QUICK)
    rows, code = [], 0
    with tempfile.TemporaryDirectory(prefix="dilocox-scaling-") as folder:
        for sites in (2, 4):
            try:
                rows += measure(sites, cases, Path(folder), table)
            except DilocoxError as error:
                # Results measured before the failure are kept.
                common.say(f"scaling_check: {error}")
                code = 1
                break
    if not rows:
        return code
    plan_check.show(rows)
    # The committed file has all runs; a partial result must not replace it.
    path = options.json or (None if options.quick or code else RESULTS)
    if path:
        common.write_json(path, "scaling_check", on, {"ratio": RATIO, "quota_of_machine": MOST},
                          rows)  # fmt: skip
    return code


if __name__ == "__main__":
    sys.exit(main())
