"""Measures the damage that two dishonest sites of eight do, by attack and by admission rule.

Eight sites train one tiny model on the source of Python's standard library, in one process, with
the engine's own admission and outer code (`benchmarks.attacks.sites`). The last two sites attack as
the row says; the columns are settings of `[admission]`. A figure is the held-out loss at the end
over the loss of the run with honest sites and the rule `mean`. 1.000 means no damage; `ruined`
means a loss that is not finite or above that of an untrained model. `counted` is the share of the
dishonest sites' contributions that counted, `honest out` the share of honest contributions that did
not.

The last rows are real runs of a coordinator and four sites as processes. One site is altered
(`benchmarks.attacks.process`). Each run is made with `aggregation = "clip"` and the gate, and with
the mean only.

`--json FILE` is written after every cell; a benchmark that is started again continues from it.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from typing import Any

import torch

from benchmarks import common
from benchmarks.attacks import process as attacks_process
from benchmarks.attacks.lm import SYMBOLS, Text
from benchmarks.attacks.moves import MOVES, NONE, Move
from benchmarks.attacks.sites import (
    ATTACKERS,
    BATCH,
    CODEC,
    INNER_RATE,
    OUTER_MOMENTUM,
    OUTER_RATE,
    RULES,
    SITES,
    TOLERANCE,
    Course,
    Length,
)

FULL, QUICK = Length(12, 20), Length(5, 12)
QUICK_MOVES = (
    "sign flip x10", "ALIE z=1.5", "label shift", "zero", "copy", "copy, unchecked", "NaN",
)  # fmt: skip
RUINED = math.log(SYMBOLS)


def cell(move: Move, rule: str, length: Length, seed: int, text: Text) -> common.Row:
    """Train one run under one attack and one rule, and return its row.

    The row lacks the ratio to the clean run.
    """
    began = time.monotonic()
    course = Course(move, rule, length, seed, text)
    loss = course.run()
    tally, honest = course.tally, [site for site in SITES if site not in course.attackers]
    row: common.Row = {
        "kind": "in-process",
        "attack": move.name,
        "rule": rule,
        "loss": None if math.isnan(loss) else round(loss, 4),
        "honest_out": round(tally.share(honest), 3),
        "honest_flagged": round(tally.flag_share(honest), 3),
    }
    if course.attackers:
        exchanges = max(1, tally.exchanges)
        refused = course.refused / (exchanges * len(ATTACKERS))
        row["attackers_counted"] = round(1 - tally.share(ATTACKERS) - refused, 3)
        row["attackers_flagged"] = round(tally.flag_share(ATTACKERS), 3)
        row["reasons"] = tally.codes(ATTACKERS) or ("refused" if refused else "")
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def over_clean(row: common.Row, clean: float | None) -> float | None:
    """Return the loss over the clean run's. None if a loss is unknown or the run was ruined."""
    if clean is None or row["loss"] is None or row["loss"] > RUINED:
        return None
    return round(float(row["loss"]) / clean, 4)


def show(rows: list[common.Row], clean: float | None) -> str:
    """Return the table: a line per attack, a column per rule."""
    lines = []
    for move in (NONE, *MOVES):
        cells = {row["rule"]: row for row in rows if row["attack"] == move.name
                 and row["kind"] == "in-process"}  # fmt: skip
        if not cells:
            continue
        line: common.Row = {"attack": move.name}
        for rule, row in cells.items():
            ratio = over_clean(row, clean)
            line[rule] = "ruined" if ratio is None else f"{ratio:.3f}"
        gated = cells.get("clip+gate") or next(iter(cells.values()))
        line["counted"] = gated.get("attackers_counted")
        line["honest out"] = gated["honest_out"]
        line["reasons"] = gated.get("reasons") or ""
        lines.append(line)
    columns: dict[str, Any] = {"attack": "", **dict.fromkeys(RULES, str)}
    columns |= {"counted": ".2f", "honest out": ".2f", "reasons": str}
    return common.table(lines, columns)


def main() -> None:
    """Run the benchmark."""
    parser = common.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--in-process", action="store_true", help="leave out the rows with real processes"
    )
    options = parser.parse_args()
    common.end_on_signals()
    logging.disable(logging.WARNING)  # every payload that is refused is said by the engine, too
    torch.set_num_threads(1)
    on, length = common.machine(), QUICK if options.quick else FULL
    settings: dict[str, Any] = {
        "sites": len(SITES), "attackers": len(ATTACKERS), "rounds": length.rounds,
        "inner_steps": length.inner_steps, "batch": BATCH, "codec": CODEC,
        "inner_learning_rate": INNER_RATE, "outer_learning_rate": OUTER_RATE,
        "outer_momentum": OUTER_MOMENTUM, "gate_tolerance": TOLERANCE, "seed": options.seed,
    }  # fmt: skip
    rows = common.read_rows(options.json, "attacks", settings)
    Bench(options, on, settings, length, rows).run()


class Bench:
    """All cells of the grid, measured one after the other."""

    def __init__(
        self,
        options: argparse.Namespace,
        on: dict[str, Any],
        settings: dict[str, Any],
        length: Length,
        rows: list[common.Row],
    ) -> None:
        self.options, self.on, self.settings, self.length = options, on, settings, length
        self.rows = rows

    @property
    def clean(self) -> float | None:
        """Loss of the run in which all sites are honest."""
        return self.reference({"kind": "in-process", "attack": "", "rule": ""})

    def reference(self, row: common.Row) -> float | None:
        """Return the loss with which `row` is compared. None if it is not known.

        It is that of the honest run of the same kind and settings.
        """
        beside = row.get("beside", "none")
        for each in [*self.rows, row]:
            usual = beside not in ("none", "real: none") or each["rule"] == "mean"
            if usual and each["kind"] == row["kind"] and each["attack"] == beside:
                return float(each["loss"])
        return None

    def run(self) -> None:
        """Measure all missing rows, then print the tables."""
        text = Text()
        moves = [NONE, *(m for m in MOVES if not self.options.quick or m.name in QUICK_MOVES)]
        todo = [(move, rule) for move in moves for rule in RULES]
        done = {(row["attack"], row["rule"]) for row in self.rows}
        for number, (move, rule) in enumerate(todo, 1):
            if (move.name, rule) in done:
                continue
            row = cell(move, rule, self.length, self.options.seed, text)
            self.keep(row)
            ratio = row["over_clean"]
            common.say(
                f"{number}/{len(todo)} {move.name}, {rule}: "
                f"{'ruined' if ratio is None else f'{ratio:.3f}'} ({row['seconds']} s)"
            )
        if not self.options.in_process:
            for row in attacks_process.rows(done, self.options.quick, common.say):
                self.keep(row)
        print(f"held-out loss over the clean run's {self.clean:.3f}; counted, out: clip+gate")
        print(show(self.rows, self.clean))
        real = [row for row in self.rows if row["kind"] == "processes"]
        if real:
            print()
            print(common.table(real, {
                "attack": "", "rule": "", "loss": ".3f", "over_clean": ".3f", "named": str,
                "ended": str, "verify": str,
            }))  # fmt: skip

    def keep(self, row: common.Row) -> None:
        """Add a row, and write all rows."""
        row["commit"] = common.commit()
        row["over_clean"] = over_clean(row, self.reference(row))
        self.rows.append(row)
        if self.options.json is not None:
            common.write_json(self.options.json, "attacks", self.on, self.settings, self.rows)
