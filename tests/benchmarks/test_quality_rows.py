"""The entries, their run files, their learning rates, and which of them are trained."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
from benchmarks.quality import command as quality
from benchmarks.quality import jobs as quality_jobs
from benchmarks.quality import rows as quality_rows
from benchmarks.quality import run as quality_run
from benchmarks.quality import tuning as quality_tuning
from benchmarks.quality.data import Text
from benchmarks.quality.jobs import Job
from benchmarks.quality.rows import Entry
from benchmarks.quality.tuning import Rates

ENTRIES = quality_rows.all_entries()


def options(*words: str) -> argparse.Namespace:
    return quality.arguments().parse_args(words)


def test_labels_are_unique_and_quick_ones_exist() -> None:
    labels = [entry.label for entry in ENTRIES]
    assert len(set(labels)) == len(labels)
    assert set(quality_rows.QUICK) | set(quality_rows.BASELINES.values()) <= set(labels)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.label)
def test_every_entry_makes_a_run_file(entry: Entry, tmp_path: Path) -> None:
    text = Text(tmp_path)
    for regime, sites, iid in (("paper", 4, False), ("long", 2, True)):
        job = Job(entry, regime, sites, iid, 0, {"inner.learning_rate": 0.002})
        config = quality_run.configuration(job, text, tmp_path / "run")
        assert config.outer.method == entry.method
        assert config.total_steps == quality_rows.REGIMES[regime].steps
        assert config.inner.learning_rate == 0.002
        assert sum(config.site_batch(site) for site in config.sites) == quality_rows.BATCH
        assert all((own.data is None) == iid for own in config.sites.values())
        assert (config.control.link is None) == (entry.target is None)


def test_what_is_tried_out_has_the_same_tokens_on_a_busy_machine(tmp_path: Path) -> None:
    """Where the link is measured, sites would else take fewer steps whose cores are busy."""
    entry = quality_rows.tried_entry("method=dilocox outer.inner_steps=8 outer.delay=2")
    job = Job(entry, "paper", 4, False, 0, {})
    control = quality_run.configuration(job, Text(tmp_path), tmp_path / "run").control
    assert (control.adapt, control.step_seconds) == ("link", None)
    assert control.steps == "equal"


def test_runs_have_the_tokens_that_regimes_promise(tmp_path: Path) -> None:
    job = Job(ENTRIES[0], "paper", 4, True, 0, {})
    size = quality_run.parameters(quality_run.configuration(job, Text(tmp_path), tmp_path))
    tokens = quality_rows.REGIMES["long"].steps * quality_rows.BATCH * 128
    assert 20 * size <= tokens < 20.5 * size
    assert quality_rows.REGIMES["paper"].steps == 32 * 20


def test_uplink_makes_synchronous_training_as_slow_as_the_target() -> None:
    link = quality_rows.uplink(500, sites=4, parameters=1_000_000)
    assert link.endswith("kbit")
    bytes_per_second = float(link.removesuffix("kbit")) * 1000 / 8
    seconds = 8 * 3 / 4 * 1_000_000 / (bytes_per_second * quality_rows.UTILISATION)
    assert seconds == pytest.approx(500 * quality_rows.STEP_SECONDS, rel=1e-4)


def test_an_entry_is_read_from_words() -> None:
    entry = quality_rows.tried_entry(
        "method=sparseloco outer.inner_steps=5 compression.error_feedback=false target=200 "
        "inner.optimizer=muon inner.clip=0.5"
    )
    assert (entry.method, entry.target, entry.optimizer) == ("sparseloco", 200, "muon")
    assert entry.settings == {
        **quality_rows.DECLARED,
        "outer.inner_steps": 5,
        "compression.error_feedback": False,
        "inner.optimizer": "muon",
        "inner.clip": 0.5,
    }
    with pytest.raises(ValueError, match=r"section\.key=value"):
        quality_rows.tried_entry("inner_steps")


@pytest.mark.parametrize(
    ("words", "tuned_as"),
    [
        ("outer.inner_steps=5", "dilocox"),
        ("method=opendiloco", "diloco"),
        ("method=intellect1", "diloco"),
        ("method=sparseloco", "sparseloco"),
        ("method=allreduce inner.optimizer=muon", "allreduce muon"),
        ("inner.optimizer=muon target=500", "dilocox muon"),
        ("method=sparseloco inner.optimizer=muon", "sparseloco"),
    ],
)
def test_what_is_tried_out_has_the_rates_of_its_method_s_trials(words: str, tuned_as: str) -> None:
    assert quality_rows.tried_entry(words).tuned_as == tuned_as
    assert tuned_as in quality_rows.tuning_entries()


def loss(rates: Rates) -> float:
    """Best at 0.005 and .7/.7, far from the published rates; the largest rate diverges."""
    if rates.inner > 0.01:
        return math.inf
    outer, momentum = rates.outer or (0.7, 0.7)
    return abs(math.log(rates.inner / 0.005)) + abs(outer - 0.7) + abs(momentum - 0.7)


@pytest.mark.parametrize("tuned_as", quality_rows.tuning_entries())
def test_everyone_gets_the_same_number_of_trials(tuned_as: str) -> None:
    done: dict[Rates, float] = {}
    while trials := quality_tuning.open_trials(tuned_as, done):
        done[trials[0]] = loss(trials[0])
    assert len(done) == quality_tuning.TRIALS
    entry = Entry("x", "x", tuned_as=tuned_as, rates="all")
    best = quality_tuning.chosen(entry, done)
    assert loss(best) == min(done.values())
    published = quality_tuning.chosen(Entry("x", "x", tuned_as=tuned_as), done)
    assert published.outer == quality_rows.OUTER_PUBLISHED.get(tuned_as)
    same = [trial for trial in done if trial.outer == published.outer]
    assert loss(published) == min(loss(trial) for trial in same)


def test_rates_of_long_runs_are_doubled_as_long_as_that_is_better() -> None:
    start, done = Rates(0.0015, (0.8, 0.5)), dict[Rates, float]()
    while trials := quality_tuning.open_long_trials(start, done):
        (trial,) = trials
        done[trial] = loss(trial)
    assert [trial.inner for trial in done] == [0.0015, 0.003, 0.006, 0.012]
    assert {trial.outer for trial in done} == {(0.8, 0.5)}
    entry = Entry("x", "x", tuned_as="diloco", rates="all")
    short = {start: 1.0, Rates(0.0015, (0.7, 0.9)): 2.0}
    assert quality_tuning.chosen(entry, short, done) == Rates(0.006, (0.8, 0.5))
    assert quality_tuning.chosen(entry, short, {}) == start
    # The published outer rates were not tried in long runs: nothing is known of them there.
    published = Entry("x", "x", tuned_as="diloco")
    assert quality_tuning.chosen(published, short, done) == Rates(0.0015, (0.7, 0.9))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({0.004: 1.0, 0.008: 1.1, 0.002: 1.2}, [0.004, 0.008, 0.002]),
        ({0.004: 1.0, 0.008: 1.1, 0.002: 0.8, 0.001: 0.9}, [0.004, 0.008, 0.002, 0.001]),
        ({0.004: 1.0, 0.008: math.inf, 0.002: 1.0}, [0.004, 0.008, 0.002]),
        ({0.004: 1.0, 0.008: 0.9, 0.016: 0.9}, [0.004, 0.008, 0.016]),
        # A rate that diverges in long runs has lower ones beside it.
        (
            {0.004: math.inf, 0.008: math.inf, 0.002: 1.0, 0.001: 1.1},
            [0.004, 0.008, 0.002, 0.001],
        ),
    ],
)
def test_rates_of_long_runs_are_halved_where_twice_is_not_better(
    losses: dict[float, float], expected: list[float]
) -> None:
    start, done = Rates(0.004), dict[Rates, float]()
    while trials := quality_tuning.open_long_trials(start, done):
        (trial,) = trials
        done[trial] = losses[trial.inner]
    assert [trial.inner for trial in done] == expected


def test_trials_outlive_their_file(tmp_path: Path) -> None:
    trials = {Rates(0.003, (0.7, 0.9)): 2.5, Rates(0.006, (0.7, 0.9)): math.inf}
    measured = {
        "label": "x", "reduction_total": 20.0, "seconds": 1.0, "regime": "long", "steps": 9,
        "seed": 0,
    }  # fmt: skip
    rows = [
        quality_tuning.row(
            "diloco", rates, {**measured, "val_loss": value if math.isfinite(value) else None}
        )
        for rates, value in trials.items()
    ]
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps({"rows": rows}))
    assert quality_tuning.read(file, "long") == {"diloco": trials}
    assert quality_tuning.read(file) == {}
    for row in rows:
        del row["regime"]  # as those of short runs were written at first
    file.write_text(json.dumps({"rows": rows}))
    assert quality_tuning.read(file) == {"diloco": trials}
    assert quality_tuning.read(file, "long") == {}
    assert quality_tuning.read(tmp_path / "none.json") == {}


def test_quick_is_one_row_of_each_method_it_names() -> None:
    jobs = list(quality_jobs.select(options("--quick"), {}, {}))
    assert [job.entry.label for job in jobs] == list(quality_rows.QUICK)
    assert {(job.regime, job.sites, job.iid, job.seed) for job in jobs} == {("paper", 4, False, 0)}


def test_the_core_table_has_three_seeds_in_both_regimes() -> None:
    jobs = list(quality_jobs.select(options("--only", "allreduce"), {}, {}))
    lead = {(job.regime, job.seed) for job in jobs if job.sites == 4 and not job.iid}
    assert lead == {(regime, seed) for regime in ("paper", "long") for seed in (0, 1, 2)}
    rest = {(job.regime, job.sites, job.iid, job.seed) for job in jobs} - {
        (regime, 4, False, seed) for regime, seed in lead
    }
    # One seed does not tell whether the same text at all sites costs more than their own.
    same = {("paper", 4, True, seed) for seed in (0, 1, 2)}
    assert rest == {*same, ("paper", 2, False, 0), ("paper", 2, True, 0)}
    other = quality_jobs.select(options("--only", "diloco"), {}, {})
    assert {job.seed for job in other if job.iid} == {0}


@pytest.mark.parametrize(("iid", "cells"), [("both", {(4, False)}), ("yes", {(4, True)})])
def test_what_is_tried_out_is_trained_where_it_is_asked_for(
    iid: str, cells: set[tuple[int, bool]]
) -> None:
    asked = options("--try", "outer.inner_steps=5", "--sites", "4", "--iid", iid)
    jobs = list(quality_jobs.select(asked, {}, {}))
    assert {(job.sites, job.iid) for job in jobs if job.regime == "paper"} == cells


def test_the_farthest_link_is_for_two_sites() -> None:
    jobs = list(quality_jobs.select(options("--only", "dilocox 5500x"), {}, {}))
    assert {(job.sites, job.iid) for job in jobs} == {(2, False), (2, True)}


def test_long_runs_have_a_link_beyond_the_sparsest_rival() -> None:
    jobs = list(quality_jobs.select(options("--only", "dilocox 3000x"), {}, {}))
    assert {(job.regime, job.sites, job.iid) for job in jobs} == {("long", 4, False)}


def test_muon_has_three_seeds_where_trials_were_made_and_ablations_one() -> None:
    jobs = list(quality_jobs.select(options("--only", "muon", "dilocox fixed"), {}, {}))
    seeds: dict[str, list[int]] = {}
    for job in jobs:
        assert (job.regime, job.sites, job.iid) == quality_rows.LEAD
        seeds.setdefault(job.entry.label, []).append(job.seed)
    assert seeds.pop("dilocox fixed") == [0]
    assert list(seeds) == ["allreduce muon", *(f"dilocox muon {n}x" for n in (100, 500, 1000))]
    assert all(each == [0, 1, 2] for each in seeds.values())


def test_published_rates_that_are_the_best_are_trained_once() -> None:
    words = (
        "--only",
        "dilocox-paper",
        "dilocox-paper published",
        "--regime",
        "paper",
        "--iid",
        "no",
    )
    chosen = options(*words, "--sites", "4", "--seeds", "0")
    pair = quality_rows.OUTER_PUBLISHED["dilocox-paper"]
    best = {Rates(0.003, pair): 1.0, Rates(0.003, (0.8, 0.5)): 2.0}
    assert [
        job.entry.label for job in quality_jobs.select(chosen, {"dilocox-paper": best}, {})
    ] == ["dilocox-paper"]
    other = {Rates(0.003, pair): 1.0, Rates(0.003, (0.8, 0.5)): 0.5}
    labels = [job.entry.label for job in quality_jobs.select(chosen, {"dilocox-paper": other}, {})]
    assert labels == ["dilocox-paper", "dilocox-paper published"]


def test_what_an_entry_sets_is_not_tuned_away() -> None:
    entry = Entry("x", "dilocox", {"inner.learning_rate": 0.5})
    job = Job(entry, "paper", 4, True, 0, Rates(0.003).settings)
    assert job.settings == {"inner.learning_rate": 0.5}


def test_a_name_of_nothing_is_refused() -> None:
    with pytest.raises(SystemExit, match="names no entry"):
        list(quality_jobs.select(options("--only", "dilocoxx"), {}, {}))
