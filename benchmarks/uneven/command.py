"""Measures a run of sites of unequal speed as a share of the sum of their speeds.

Four real sites (coordinator, `dilocox join`, Gloo) train in a lab on one machine. Each has a host,
and a control group whose hard CPU quota sets its speed: 1 : 0.8 : 0.5 : 0.25, together at most
`dilocox.tools.testbed.MOST` of the machine. Links are shaped; links and quotas are measured before
anything else.

First every site trains in a run of its own, all at the same time: the sum of their tokens/s is the
reference. Then all sites train one model together, once per `control.steps`. `by-speed` gives each
site as many inner steps as fit its measured speed; `equal` gives all sites the same number, so that
they wait for the slowest. Rounds before the paces have settled are not measured. Times are
wall-clock times.

`waited` is the share of the time in which a site stood still for others. `work` is the processor
time of encoding, decoding and averaging, as a share of the site's quota. This work is the same at
all sites, so it costs the slowest site most, and more than at sites with GPUs.

Needs root, iproute2 and control groups; without them it prints one line and exits with code 3.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.tools.testbed import LabError
from dilocox.tools.testbed.results import RunResult
from dilocox.tools.testbed.run import run, run_alone
from dilocox.tools.testbed.testbed import MOST, Lab, unsupported_reason

SPEEDS = {"paris": 1.0, "lyon": 0.8, "oslo": 0.5, "rome": 0.25}
LINK = "100mbit"
INNER_STEPS, FRAGMENTS = 12, 4
ALONE_STEPS = 4
"""Inner steps per round of a site by itself, whose rounds exchange nothing."""
SETTLED = 12
"""Rounds until paces follow from measurements. A site of nearly full speed counts as a fast one
until it has measured eight rounds (see `dilocox.coordinator.controller.pace`)."""
ASKED = 0.9


def quotas(cores: float | None) -> dict[str, float]:
    """Return the CPU cores of each site: at most one, and `cores` in all, or `MOST` of the
    machine."""
    every = cores or MOST * len(os.sched_getaffinity(0))
    most = min(1.0, every / sum(SPEEDS.values()))
    return {site: round(most * speed, 3) for site, speed in SPEEDS.items()}


def configuration(
    root: Path, name: str, rounds: int, steps: str, width: int, inner_steps: int
) -> RunConfig:
    """Return the run file of one setting. Exchanges have half a round to complete.

    `steps`: value of `control.steps`. `width`: hidden size of the model.
    """
    return resolve_run(
        {
            "run": {"name": name, "folder": str(root / "{name}")},
            "model": {
                "architecture": {
                    "model_type": "qwen3", "hidden_size": width, "intermediate_size": 3 * width,
                    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "head_dim": width // 4, "max_position_embeddings": 128,
                    "tie_word_embeddings": True,
                }
            },
            "data": {
                "source": "python-stdlib", "folder": str(root / "data"), "vocabulary_size": 1024,
                "sequence_length": 128, "max_documents": 200, "validation_sequences": 8,
            },
            "site": {"batch_size": 4, "micro_batch_size": 4, "threads": 1, "device": "cpu"},
            "outer": {
                "rounds": rounds, "inner_steps": inner_steps, "fragments": FRAGMENTS,
                "delay": inner_steps // 2,
            },
            "control": {"adapt": "off", "steps": steps},
            "checkpoint": {"every_rounds": 0},
            "evaluation": {"completion_tokens": 0},
            "record": {"enabled": False},
            "sites": {site: {} for site in SPEEDS},
        },
        where="uneven benchmark",
    )  # fmt: skip


def rows_of(
    steps: str, result: RunResult, alone: dict[str, float], cores: dict[str, float]
) -> list[common.Row]:
    """Return one row per site, and one row for all."""
    first = result.window.first
    rows: list[common.Row] = []
    for site, found in result.sites.items():
        own = [
            r for r in result.records
            if r["kind"] == "round" and r.get("site") == site and r["round"] >= first
        ]  # fmt: skip
        rows.append(
            {
                "steps": steps,
                "site": site,
                "speed": SPEEDS[site],
                "inner_steps": round(statistics.fmean(r["steps"] for r in own), 2),
                "tokens_per_second": round(found.tokens_per_second, 1),
                "alone_tokens_per_second": round(alone[site], 1),
                "share": round(found.tokens_per_second / alone[site], 4),
                "wait_share": round(found.wait_share, 4),
                "work_share": round(
                    sum(r["exchange_work_seconds"] for r in own)
                    / (cores[site] * result.window.seconds),
                    4,
                ),
            }
        )
    total = sum(alone.values())
    rows.append(
        {
            "steps": steps,
            "site": "all",
            "speed": sum(SPEEDS.values()),
            "inner_steps": round(sum(float(row["inner_steps"]) for row in rows), 2),
            "tokens_per_second": round(result.tokens_per_second, 1),
            "alone_tokens_per_second": round(total, 1),
            "share": round(result.tokens_per_second / total, 4),
            "wait_share": round(statistics.fmean(float(row["wait_share"]) for row in rows), 4),
            "work_share": round(statistics.fmean(float(row["work_share"]) for row in rows), 4),
        }
    )
    return rows


def listed(values: dict[str, float]) -> str:
    """Return `NAME VALUE` of every site as text."""
    return ", ".join(f"{site} {value:.3f}" for site, value in values.items())


def show(rows: Sequence[common.Row]) -> None:
    """Print a table on standard output."""
    print(f"{'steps':9} {'site':6} {'speed':>5} {'H':>6} {'tokens/s':>9} {'alone':>9} "
          f"{'share':>7} {'waited':>7} {'work':>7}")  # fmt: skip
    for row in rows:
        print(f"{row['steps']:9} {row['site']:6} {row['speed']:5.2f} {row['inner_steps']:6.1f} "
              f"{row['tokens_per_second']:9.1f} {row['alone_tokens_per_second']:9.1f} "
              f"{row['share']:7.1%} {row['wait_share']:7.1%} "
              f"{row['work_share']:7.1%}")  # fmt: skip


def main() -> int:
    """Measure, print and write. Returns 1 if sites reach less than `ASKED` of their summed
    speed."""
    arguments = common.parser(__doc__)
    arguments.add_argument("--rounds", type=int, help="measured rounds per arrangement")
    arguments.add_argument("--cores", type=float, help="CPU cores of all sites together")
    arguments.add_argument(
        "--inner-steps", type=int, default=INNER_STEPS, help="of the fastest site, in a round"
    )
    arguments.add_argument("--width", type=int, default=256, help="hidden size of the model")
    told = arguments.parse_args()
    common.end_on_signals()
    if common.cannot("uneven", unsupported_reason()):
        return common.CANNOT
    rounds = told.rounds or (6 if told.quick else 30)
    on = common.machine()
    rows: list[common.Row] = []
    settings: dict[str, Any] = {
        "link": LINK, "inner_steps": told.inner_steps, "fragments": FRAGMENTS,
        "delay": told.inner_steps // 2,
        "codec": "int4", "hidden_size": told.width, "measured_rounds": rounds,
        "cpu_quota_cores": listed(quotas(told.cores)),
        "commit": common.commit(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="dilocox-uneven-") as folder:
        root = Path(folder)
        try:
            with Lab(list(SPEEDS), LINK, quotas=quotas(told.cores)) as lab:
                common.say("every site by itself")
                own = configuration(
                    root, "alone", 1 + max(4, rounds), "equal", told.width, ALONE_STEPS
                )
                found = run_alone(lab, own, overwrite=True, warm_up=1)
                alone = {site: result.tokens_per_second for site, result in found.items()}
                for steps, warm_up, count in (
                    ("by-speed", SETTLED, rounds),
                    ("equal", 1, max(1, rounds // 5)),
                ):
                    common.say(f"together, {steps} steps")
                    config = configuration(
                        root, steps, warm_up + count, steps, told.width, told.inner_steps
                    )
                    result = run(lab, config, overwrite=True, warm_up=warm_up)
                    rows += rows_of(steps, result, alone, lab.quotas)
                shares = lab.verify().cores
        except LabError as error:
            common.say(str(error))
            return 1
    settings["cpu_measured_cores"] = listed(shares)
    show(rows)
    if told.json is not None:
        common.write_json(told.json, "uneven", on, settings, rows)
    reached = next(r for r in rows if (r["steps"], r["site"]) == ("by-speed", "all"))["share"]
    verdict = "reached" if float(reached) >= ASKED else "missed"
    print(f"{reached:.1%} of the sites' summed speed, {ASKED:.0%} asked: {verdict}")
    return 0 if verdict == "reached" else 1
