"""Runs that change one thing of a plan: local steps, codec, outer rates, frozen A.

They show what the controller's loss table should hold for adapters, and for a pretrained model of
which all parameters are trained. All runs have two sites, one seed that no quoted row has, and the
learning rate of synchronous training. Keys that an entry sets are pinned. The controller chooses
the others for a link on which exchanges land early. Runs of all parameters have the length and the
seed of the trials, so their baseline is a trial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.finetune.rows import (
    BASELINE,
    STEPS,
    STUDY_SEED,
    TRIAL_SEED,
    TRIAL_STEPS,
    Entry,
    Job,
    Mode,
    Precision,
    best_rate,
    entries,
)
from benchmarks.quality.rows import DECLARED, Settings

Row = dict[str, Any]

FAST_LINK = 1
"""Reduction for which the link is declared: synchronous training would just fit."""


def _plan(inner_steps: int, codec: str, learning_rate: float, momentum: float) -> Settings:
    return {
        **DECLARED,
        "outer.inner_steps": inner_steps,
        "compression.codec": codec,
        "outer.learning_rate": learning_rate,
        "outer.momentum": momentum,
    }


FROZEN: Settings = {"adapter.freeze_a": True}
PLANS: Mapping[str, Settings] = {
    "H 8, none, 1/0": _plan(8, "none", 1.0, 0.0),
    "H 8, topk:41, 1/0": _plan(8, "topk:41", 1.0, 0.0),
    "H 8, none, .7/.9": _plan(8, "none", 0.7, 0.9),
    "H 8, none, .8/.5": _plan(8, "none", 0.8, 0.5),
    "H 8, topk:41, .8/.5": _plan(8, "topk:41", 0.8, 0.5),
    "H 8, none, 1/0, A frozen": {**_plan(8, "none", 1.0, 0.0), **FROZEN},
    "H 32, none, 1/0": _plan(32, "none", 1.0, 0.0),
    "H 1, topk:41, 1/0": _plan(1, "topk:41", 1.0, 0.0),
    "H 1, topk:10, 1/0": _plan(1, "topk:10", 1.0, 0.0),
    "H 8, topk:10, 1/0": _plan(8, "topk:10", 1.0, 0.0),
    "H 2, none, 1/0": _plan(2, "none", 1.0, 0.0),
}
"""By label: round, codec, outer learning rate and momentum."""


FULL_PLANS: Mapping[str, Settings] = {
    "H 8, none, 1/0": _plan(8, "none", 1.0, 0.0),
    "H 16, int4, 1/0": _plan(16, "int4", 1.0, 0.0),
    "H 16, int4, .8/.5": _plan(16, "int4", 0.8, 0.5),
    "H 8, int2, 1/0": _plan(8, "int2", 1.0, 0.0),
}
"""The same of runs that train all parameters. All but the first send over 100 times fewer bytes,
the transfers at the end of the run not counted."""


A_FROZEN = f"{BASELINE}, A frozen"
LABELS = tuple(dict.fromkeys((BASELINE, A_FROZEN, *PLANS, *FULL_PLANS)))
"""Labels of all runs of the study."""


def jobs(mode: Mode, rows: Sequence[Row], precision: Precision) -> list[Job]:
    """Return the runs of a mode; none before synchronous training has its trials in `rows`."""
    baseline = entries(mode)[0]
    rate = best_rate(baseline, mode, list(rows), precision)
    if rate is None:
        return []
    found, plans, seed, steps = [baseline], FULL_PLANS, TRIAL_SEED, TRIAL_STEPS
    if mode == "lora":
        found.append(Entry(A_FROZEN, baseline.method, {**baseline.settings, **FROZEN}))
        plans, seed, steps = PLANS, STUDY_SEED, STEPS
    found += [Entry(label, "dilocox", plan, FAST_LINK) for label, plan in plans.items()]
    return [Job(entry, mode, 2, seed, rate, steps, precision) for entry in found]


def table(mode: Mode, rows: Sequence[Row], precision: Precision) -> str:
    """Return the study's rows of a mode as aligned text, with the gap to synchronous training."""
    asked = jobs(mode, rows, precision)
    mine = [row for row in rows if any(job.made(row) for job in asked)]
    base = next((row["val_loss"] for row in mine if row["label"] == BASELINE), None)
    lines = [
        {**row, "gap": row["val_loss"] / base - 1 if base and row["val_loss"] else None}
        for row in mine
    ]
    columns = {
        "mode": "s", "label": "s", "plans": "s",
        "val_loss": ".4f", "gap": "+.2%", "reduction_total": ",.1f",
    }  # fmt: skip
    return common.table(lines, columns)
