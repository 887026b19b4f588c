"""Entries of the fine-tuning benchmark: every method, with adapters and with all parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.quality.rows import DECLARED, Settings, uplink

Mode = Literal["lora", "full"]
Precision = Literal["bf16", "fp32"]
"""Data type of the computation. Trained parameters are in fp32 with both."""

ADAPTER: dict[str, Any] = {"kind": "lora", "rank": 16, "alpha": 32.0}
SEQUENCE_LENGTH = 256
BATCH = 8
"""Sequences per inner step, of all sites together."""
STEPS = 64
TRIAL_STEPS = 32
WARMUP_STEPS = 8
ROUND = 16
"""Inner steps of a round of the methods that do not choose them."""
SEEDS = (0, 1, 2)
TRIAL_SEED = 1000
STUDY_SEED = 2000
UNQUOTED = (TRIAL_SEED, STUDY_SEED)
"""Seeds of the runs that choose the learning rate, and of the runs of `study`."""
RATES: Mapping[Mode, tuple[float, ...]] = {
    "lora": (3e-4, 1e-3, 3e-3),
    "full": (1e-5, 3e-5, 1e-4),
}
"""Inner learning rates that are tried for every entry alike."""
BASELINE = "allreduce"
TARGETS: Mapping[Mode, tuple[int, ...]] = {"lora": (20, 40), "full": (100,)}
"""Reductions in all for which links of `dilocox` are declared, against synchronous training of the
same parameters. Synchronous training of all parameters sends 27 times what adapters of rank 16
send, so 40 times fewer bytes than synchronous adapters are 1,000 times fewer than that."""


@dataclass(frozen=True)
class Entry:
    """One line of the table: a method, and the keys of the run file that are set for it."""

    label: str
    method: str
    settings: Settings = field(default_factory=dict)
    target: int | None = None
    """Reduction in all for which the declared link is made."""


@dataclass(frozen=True)
class Job:
    """One run to train, whose result is one row."""

    entry: Entry
    mode: Mode
    sites: int
    seed: int
    rate: float
    steps: int = STEPS
    precision: Precision = "bf16"

    @property
    def key(self) -> dict[str, Any]:
        """The fields that identify the row."""
        return {
            "label": self.entry.label,
            "mode": self.mode,
            "sites": self.sites,
            "seed": self.seed,
            "learning_rate": self.rate,
            "steps": self.steps,
            "precision": self.precision,
        }

    def made(self, row: Mapping[str, Any]) -> bool:
        """Return whether `row` is the result of this run."""
        return all(row[key] == value for key, value in self.key.items())

    @property
    def is_trial(self) -> bool:
        """Whether the run only serves to choose rates. It is not quoted, and answers no task."""
        return self.seed in UNQUOTED

    def link(self, trained: int) -> str | None:
        """Return the declared link of a run that trains so many parameters, or None."""
        if self.entry.target is None:
            return None
        return uplink(self.entry.target, self.sites, trained)

    def __str__(self) -> str:
        kind = "trial" if self.is_trial else f"seed {self.seed}"
        found = f"{self.entry.label}, {self.mode}, {self.sites} sites, rate {self.rate:g}"
        return f"{found}, {self.precision}, {kind}"


def entries(mode: Mode) -> list[Entry]:
    """Return the entries of a mode; the most quoted ones come first."""
    rounds: Settings = {"outer.inner_steps": ROUND}
    dense: Settings = {**rounds, "outer.exchange": "reduce"}
    plain: Settings = {"outer.learning_rate": 1.0, "outer.momentum": 0.0}
    return [
        Entry(BASELINE, "allreduce", dense),
        *(Entry(f"dilocox {n}x", "dilocox", DECLARED, n) for n in TARGETS[mode]),
        Entry("diloco, Nesterov .9", "diloco", dense),
        Entry("diloco, no momentum", "diloco", {**dense, **plain}),
        Entry("sparseloco", "sparseloco", rounds),
        Entry("cocktailsgd", "cocktailsgd", rounds),
        Entry("dilocox-paper", "dilocox-paper", {**rounds, "compression.codec": "lowrank:8"}),
    ]


def trials(entry: Entry, mode: Mode, precision: Precision) -> list[Job]:
    """Return the runs that choose the learning rate of `entry`, with two sites."""
    return [Job(entry, mode, 2, TRIAL_SEED, rate, TRIAL_STEPS, precision) for rate in RATES[mode]]


def best_rate(
    entry: Entry, mode: Mode, rows: list[dict[str, Any]], precision: Precision
) -> float | None:
    """Return the rate with the lowest loss in the trials, or None unless all were made.

    Trials of another precision serve if those of `precision` were not all made. A trial that
    diverged has no loss and counts as infinite.
    """
    losses: dict[str, dict[float, float]] = {}
    for row in rows:
        named = row["label"], row["mode"], row["seed"], row["steps"]
        if named == (entry.label, mode, TRIAL_SEED, TRIAL_STEPS):
            found = row["val_loss"]
            mine = losses.setdefault(row["precision"], {})
            mine[row["learning_rate"]] = float("inf") if found is None else found
    whole = {key: mine for key, mine in losses.items() if set(mine) == set(RATES[mode])}
    if not whole:
        return None
    chosen = whole.get(precision) or next(iter(whole.values()))
    return min(chosen, key=lambda rate: chosen[rate])


def quoted(
    mode: Mode,
    sites: int,
    seeds: tuple[int, ...],
    rows: list[dict[str, Any]],
    precision: Precision,
) -> Iterator[Job]:
    """Yield the runs that are quoted, of the entries whose rate is known."""
    for seed in seeds:
        for entry in entries(mode):
            rate = best_rate(entry, mode, rows, precision)
            if rate is not None:
                yield Job(entry, mode, sites, seed, rate, precision=precision)
