"""The rows that the quality benchmark trains: entries by regime, sites, kind of text and seed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from benchmarks.quality import grid as quality_grid
from benchmarks.quality import rows as quality_rows
from benchmarks.quality import tuning as quality_tuning
from benchmarks.quality.rows import LEAD, LONG, Entry, Group, Settings

SEEDS = (0, 1, 2)
OTHER_CELLS = ((4, True), (2, False), (2, True))
"""Sites and IID of further cells of the first regime, which are trained with one seed."""
SAME_TEXT, OF_SAME_TEXT = (4, True), ("allreduce", "dilocox 1000x")
"""A cell, and the labels that are trained there with every seed. One seed cannot tell whether the
same text costs more than the sites' own."""


@dataclass(frozen=True)
class Job:
    """One run to train, whose result is one row."""

    entry: Entry
    regime: str
    sites: int
    iid: bool
    seed: int
    rates: Settings

    @property
    def key(self) -> dict[str, Any]:
        """The fields that identify the row."""
        return {
            "label": self.entry.label,
            "regime": self.regime,
            "sites": self.sites,
            "iid": self.iid,
            "seed": self.seed,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of the run file that the row sets: learning rates, then the entry's own keys."""
        return {**self.rates, **self.entry.settings}

    @property
    def settings_text(self) -> str:
        """The `settings` and the target of the link, as one line."""
        words = [f"{key}={value}" for key, value in sorted(self.settings.items())]
        if self.entry.target is not None:
            words.append(f"target={self.entry.target}")
        return " ".join(words)

    def __str__(self) -> str:
        kind = "IID" if self.iid else "non-IID"
        return f"{self.entry.label}, {self.regime}, D={self.sites}, {kind}, seed {self.seed}"


def select(
    options: argparse.Namespace, trials: quality_tuning.Trials, longer: quality_tuning.Trials
) -> Iterable[Job]:
    """Yield the jobs that the options ask for; the most quoted results come first.

    Learning rates follow from `trials`, and in the long regime from `longer` if it has trials. An
    entry that would repeat another entry of its cell is left out: published rates can be the best.
    """
    seen: set[tuple[object, ...]] = set()
    for entry, regime, sites, iid, seed in _wanted(options):
        if sites not in entry.sites or regime not in entry.regimes:
            continue
        of_long = longer.get(entry.tuned_as, {}) if regime == LONG else {}
        rates = quality_tuning.chosen(entry, trials.get(entry.tuned_as, {}), of_long)
        job = Job(entry, regime, sites, iid, seed, rates.settings)
        identity = (entry.method, job.settings_text, regime, sites, iid, seed)
        if identity not in seen:
            seen.add(identity)
            yield job


def _wanted(options: argparse.Namespace) -> Iterable[tuple[Entry, str, int, bool, int]]:
    known = quality_rows.all_entries()
    if options.quick:
        labels = {entry.label: entry for entry in known}
        known = [labels[label] for label in quality_rows.QUICK]
    if options.loss_table:
        known = quality_grid.entries()
    if options.tried:
        known = [quality_rows.tried_entry(text) for text in options.tried]
    known = chosen_by_name(known, options.only)
    core = [entry for entry in known if entry.group == "core"]
    muon = [entry for entry in known if entry.group == "muon"]
    ablations = [entry for entry in known if entry.group == "ablations"]
    seeds = options.seeds[:1] if options.quick else options.seeds
    if options.loss_table:
        yield from ((entry, *LEAD, seeds[0]) for entry in ablations)
        return
    regimes = ["paper"] if options.quick else options.regime
    for regime in regimes:
        if 4 in options.sites and options.iid != "yes":
            yield from ((entry, regime, 4, False, seed) for seed in seeds for entry in core)
            if regime == LEAD[0]:
                yield from ((entry, regime, 4, False, seed) for seed in seeds for entry in muon)
            if regime == LEAD[0] or options.tried:
                yield from ((entry, regime, 4, False, seeds[0]) for entry in ablations)
    if options.quick or LEAD[0] not in regimes:
        return
    for sites, iid in OTHER_CELLS:
        if sites not in options.sites or options.iid not in ("both", "yes" if iid else "no"):
            continue
        yield from ((entry, LEAD[0], sites, iid, seeds[0]) for entry in core)
        if options.tried and options.iid == "yes":
            # Entries of --try are trained in the first cell, unless --iid asks for the same text.
            yield from ((entry, LEAD[0], sites, iid, seeds[0]) for entry in ablations)
        if (sites, iid) == SAME_TEXT:
            few = [entry for entry in core if entry.label in OF_SAME_TEXT]
            yield from ((entry, LEAD[0], sites, iid, seed) for seed in seeds[1:] for entry in few)


def chosen_by_name(known: list[Entry], names: list[str] | None) -> list[Entry]:
    """Return the entries that `names` select: groups, labels, or methods that are no labels.

    None selects all. Raises `SystemExit` for an unknown name.
    """
    if names is None:
        return known
    labels = {entry.label for entry in known}
    methods = {entry.method for entry in known} - labels
    unknown = sorted(set(names) - labels - methods - set(get_args(Group)))
    if unknown:
        raise SystemExit(f"quality: --only {unknown[0]!r}: names no entry; there are {labels}")
    return [
        entry
        for entry in known
        if {entry.group, entry.label, *({entry.method} & methods)} & set(names)
    ]
