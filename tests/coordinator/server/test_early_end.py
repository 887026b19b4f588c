"""A run that ends before its planned steps are done: who may end it, and what the log keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.held_out import HeldOut
from dilocox.errors import ConfigError
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

EARLY = {"rounds": 40, "inner_steps": 4}


def evaluating(sites: str = "abc", patience: int = 2) -> RunConfig:
    return run_config(
        sites, outer=EARLY, evaluation={"every_rounds": 1, "patience": patience},
        checkpoint={"every_rounds": 1},
    )  # fmt: skip


def tell(
    driver: Driver, site: str, round_: int, loss: Any, kind: m.ReportKind | None = None, **more: Any
) -> None:
    """A site's leading rank reports a held-out loss."""
    first = next(iter(driver.config.sites))
    known: m.ReportKind = kind or ("evaluation" if site == first else "peer_evaluation")
    metrics = {"val_loss": loss, "after_round": round_, **more}
    rank = driver.check(m.RankId(site=site, stage=0, shard=0))
    driver.core.report(m.ReportRequest(rank=rank, round=round_, kind=known, metrics=metrics))


def train(driver: Driver, round_: int, losses: Mapping[str, Any], **more: Any) -> m.RoundPlan:
    """A round is planned, trained and evaluated; its plan."""
    plan = driver.plan(round_, next(iter(driver.config.sites)))
    assert plan is not None
    for site in plan.members:
        driver.round_done(site, round_)
    for site, loss in losses.items():
        tell(driver, site, round_, loss, **more)
    return plan


def test_more_than_half_of_the_sites_end_a_run(tmp_path: Path) -> None:
    driver = Driver(tmp_path, evaluating())
    driver.start()
    # One site alone says that nothing becomes better, or nothing at all that is a number.
    for round_, false in enumerate([3.0, 9.0, None, 9.0, "x", 9.0]):
        train(driver, round_, {"a": 5.0 - round_, "b": false, "c": 6.0 - round_})
    assert driver.core.state.ends_early == ""
    train(driver, 6, {"a": 2.0, "b": 9.0, "c": 2.0})
    # Its lowest was -0.0 and 1.0: the second evaluation in a row is to come.
    assert driver.core.state.ends_early == ""
    train(driver, 7, {"a": 2.0, "b": 9.0})
    why = driver.core.state.ends_early
    assert "the last 2 evaluations (evaluation.patience), at a, b" in why
    flush = driver.plan(8, "a")
    assert flush is not None
    assert (flush.kind, flush.reason, flush.first_step) == ("flush", why, 32)
    assert flush.checkpoint
    assert flush.evaluate
    assert driver.plan(8, "b") == flush
    for site in "abc":
        driver.finish(site)
    assert (driver.core.state.phase, driver.core.state.reason) == ("finished", why)
    assert replayed(driver) == driver.core.state


def test_of_two_sites_both_have_to_say_so(tmp_path: Path) -> None:
    driver = Driver(tmp_path, evaluating("ab", patience=1))
    driver.start()
    for round_ in range(3):
        train(driver, round_, {"a": 5.0, "b": 5.0 - round_})
    assert driver.core.state.ends_early == ""
    train(driver, 3, {"a": 5.0, "b": 5.0})
    assert driver.core.state.ends_early != ""


def test_a_callback_speaks_at_the_site_that_evaluates(tmp_path: Path) -> None:
    config = run_config(outer=EARLY, evaluation={"every_rounds": 2})
    driver = Driver(tmp_path, config)
    driver.start()
    assert driver.plan(0, "a")
    tell(driver, "b", 0, 6.0, "first_evaluation", ends=True)
    tell(driver, "a", 0, 6.0, "first_evaluation", ends=1)
    # Round 0 has no evaluation, round 1 has one.
    train(driver, 0, {"a": 5.0}, ends=True)
    train(driver, 1, {"b": 5.0}, ends=True)
    tell(driver, "c", 1, 5.0, "evaluation", ends=True)
    assert driver.core.state.ends_early == ""
    # A plan that is made already is trained.
    assert driver.plan(2, "a")
    tell(driver, "a", 1, 5.0, ends=True)
    assert driver.core.state.ends_early == "a: on_evaluation returned True"
    assert train(driver, 2, {}).kind == "train"
    flush = driver.plan(3, "b")
    assert flush is not None
    assert flush.kind == "flush"


def test_the_first_evaluation_may_end_a_run(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config(outer=EARLY))
    driver.start()
    assert driver.plan(0, "a")
    tell(driver, "a", 0, 6.0, "first_evaluation", ends=True)
    assert train(driver, 0, {}).kind == "train"
    flush = driver.plan(1, "b")
    assert flush is not None
    assert flush.kind == "flush"


def test_a_run_that_is_through_did_not_end_early(tmp_path: Path) -> None:
    config = run_config(outer={"rounds": 1}, evaluation={"every_rounds": 1})
    driver = Driver(tmp_path, config)
    driver.start()
    train(driver, 0, {})
    assert driver.plan(1, "a")
    tell(driver, "a", 1, 4.0, ends=True)
    assert driver.core.state.ends_early == ""
    for site in "abc":
        driver.finish(site)
    assert (driver.core.state.phase, driver.core.state.reason) == ("finished", "")


def test_a_resume_counts_from_where_it_goes_on(tmp_path: Path) -> None:
    driver = Driver(tmp_path, evaluating("ab", patience=2))
    driver.start()
    for round_, loss in enumerate([5.0, 5.5]):
        train(driver, round_, {"a": loss, "b": loss})
    ticks = 2 * driver.core.state.plans[1].slots
    for site in "ab":
        driver.write_checkpoint(site, ticks, 2, 0)
    train(driver, 2, {"a": 5.2, "b": 5.3})
    assert driver.core.state.ends_early != ""
    driver.reopen()
    assert driver.core.state.ends_early != ""
    driver.core.resume()
    assert driver.core.state.ends_early == ""
    known = HeldOut(5.0, 1, round=1)
    assert driver.core.state.held_out == {"a": known, "b": known}
    assert replayed(driver) == driver.core.state
    driver.reopen()
    driver.start()
    train(driver, 2, {"a": 5.2, "b": 5.3})
    assert driver.core.state.ends_early != ""


def test_an_evaluation_that_a_resume_repeats_counts_once(tmp_path: Path) -> None:
    """A slow disk: the checkpoint is complete after the next round was evaluated."""
    driver = Driver(tmp_path, evaluating("ab", patience=3))
    driver.start()
    for round_, loss in enumerate([5.0, 5.5, 5.2]):
        train(driver, round_, {"a": loss, "b": loss})
    for site in "ab":
        driver.write_checkpoint(site, 2 * driver.core.state.plans[1].slots, 2, 0)
    driver.reopen()
    driver.core.resume()
    driver.start()
    train(driver, 2, {"a": 5.2, "b": 5.2})
    assert driver.core.state.ends_early == ""
    assert driver.core.state.held_out["a"] == HeldOut(5.0, 2, round=2)
    assert replayed(driver) == driver.core.state
    train(driver, 3, {"a": 5.1, "b": 5.1})
    assert "in the last 3 evaluations" in driver.core.state.ends_early


def test_patience_without_evaluations_is_refused() -> None:
    with pytest.raises(ConfigError, match="set every_rounds, or leave patience out"):
        run_config(evaluation={"patience": 2})
