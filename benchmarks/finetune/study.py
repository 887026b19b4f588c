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
}
"""The same of runs that train all parameters. Two of them send over 100 times fewer bytes."""


A_FROZEN = f"{BASELINE}, A frozen"
LABELS = tuple(dict.fromkeys((BASELINE, A_FROZEN, *PLANS, *FULL_PLANS)))
"""Labels of all runs of the study."""


def jobs(mode: Mode, rows: Sequence[Row]) -> list[Job]:
    """Return the runs of a mode; none before synchronous training has its trials in `rows`."""
    baseline = entries(mode)[0]
    rate = best_rate(baseline, mode, list(rows))
    if rate is None:
        return []
    if mode == "full":
        made = [Entry(label, "dilocox", plan, FAST_LINK) for label, plan in FULL_PLANS.items()]
        return [Job(entry, mode, 2, TRIAL_SEED, rate, TRIAL_STEPS) for entry in made]
    frozen = Entry(A_FROZEN, baseline.method, {**baseline.settings, **FROZEN})
    found = [baseline, frozen]
    found += [Entry(label, "dilocox", plan, FAST_LINK) for label, plan in PLANS.items()]
    return [Job(entry, mode, 2, STUDY_SEED, rate, STEPS) for entry in found]


def table(mode: Mode, rows: Sequence[Row]) -> str:
    """Return the study's rows of a mode as aligned text, with the gap to synchronous training."""
    found = list(rows)
    rate = best_rate(entries(mode)[0], mode, found)
    seed, names = (STUDY_SEED, LABELS) if mode == "lora" else (TRIAL_SEED, (BASELINE, *FULL_PLANS))
    mine = [
        row
        for row in found
        if (row["mode"], row["seed"], row["learning_rate"]) == (mode, seed, rate)
        and row["label"] in names
    ]
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
