"""Measures tokens/s over links with round trips of 30 and 100 ms, against sites without a network.

Two sites train in a lab (`dilocox.tools.testbed`) that delays all packets between them, by `netem`
or by a relay in user space. Round trips are measured before anything is reported. At each round
trip there is one run of each kind:

- no exchange: each site by itself, both at the same time, as in `benchmarks.wan`;
- `dilocox` with its defaults; its controller measures link and latency, and the first half of the
  run does not count;
- `diloco`: sites stand still for one dense exchange per round;
- `allreduce`: one exchange per step.

`share_of_no_network` is tokens/s over tokens/s without exchange at the same round trip. It takes
about five minutes on two idle cores, and two minutes with --quick (100 ms only). It needs the same
as `dilocox lab`; otherwise it prints one line and exits with code 3.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks import common
from benchmarks.wan import run as wan_run
from benchmarks.wan.grid import NONE, SITES, Settings
from dilocox.errors import DilocoxError
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.testbed import unsupported_reason

RESULTS = common.RESULTS / "latency-cpu.json"
LINK = "20mbit"
ROUND_TRIPS_MS = (0, 30, 100)
QUICK_MS = (100,)
LIMIT = 600.0
"""Seconds after which a run is aborted."""
NONE_ROUNDS, NONE_STEPS = 3, 60
METHODS: dict[str, tuple[Settings, int, int | None]] = {
    "dilocox": ({}, 400, None),
    "diloco": ({"outer.method": "diloco", "outer.inner_steps": 50}, 150, 1),
    "allreduce": ({"outer.method": "allreduce", "outer.inner_steps": 1}, 16, 2),
}
"""Keys of the run file, inner steps, and rounds that are not measured. None: half of the steps are
not measured."""


def measure(milliseconds: int, folder: Path) -> list[common.Row]:
    """Measure all methods at one round trip, in milliseconds. Raises `LabError`."""
    rows: list[common.Row] = []
    with Lab(list(SITES[:2]), LINK, delay=milliseconds / 2000) as lab:
        alone = wan_run.measure_none(lab, folder, NONE_ROUNDS, NONE_STEPS)
        measured = {NONE: alone}
        for method, (settings, steps, warm_up) in METHODS.items():
            measured[method] = wan_run.measure_run(
                lab, folder, settings, steps, warm_up, limit=LIMIT
            )
        checked = lab.verify()
        for method, found in measured.items():
            rows.append(
                {
                    "method": method,
                    "round_trip_asked_ms": milliseconds,
                    "round_trip_ms": round(1000 * checked.round_trip, 2),
                    "link": LINK,
                    "sites": len(lab.sites),
                    "tokens_per_second": round(found["tokens_per_second"], 1),
                    "share_of_no_network": round(
                        found["tokens_per_second"] / alone["tokens_per_second"], 4
                    ),
                    "wait_share": found.get("wait_share"),
                    "inner_steps": found["inner_steps"],
                    "payload_bytes": found.get("payload_bytes"),
                    "wire_bytes": found["wire_bytes"],
                    "efficiency": found.get("efficiency"),
                    "plan": found.get("plan"),
                    "reason": found.get("reason"),
                }
            )
            common.say(f"{milliseconds} ms, {method}: {found['tokens_per_second']:,.1f} tokens/s")
    return rows


COLUMNS = {
    "method": "s",
    "round_trip_ms": ".1f",
    "link": "s",
    "tokens_per_second": ",.1f",
    "share_of_no_network": ".1%",
    "wait_share": ".1%",
    "inner_steps": ",.0f",
    "payload_bytes": ",.0f",
    "wire_bytes": ",.0f",
    "efficiency": ".0%",
}


def main() -> int:
    """Measure, print and write. Returns 1 if a round trip could not be measured."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    if common.cannot("latency", unsupported_reason()):
        return common.CANNOT
    on = common.machine()
    rows: list[common.Row] = []
    failures = 0
    with tempfile.TemporaryDirectory(prefix="dilocox-latency-") as folder:
        for milliseconds in QUICK_MS if options.quick else ROUND_TRIPS_MS:
            try:
                rows += measure(milliseconds, Path(folder))
            except DilocoxError as error:
                common.say(f"{milliseconds} ms: {error}")
                failures += 1
    print(common.table(rows, COLUMNS))
    # The committed file has all round trips; a partial result must not replace it.
    path = options.json or (None if options.quick or failures else RESULTS)
    if path and rows:
        common.write_json(path, "latency", on, {"link": LINK, "quota_of_machine": 0.9}, rows)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
