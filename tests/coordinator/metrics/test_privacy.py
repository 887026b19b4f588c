"""The (epsilon, delta) of private sites: closed forms, counts over resumes, words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.metrics.privacy import (
    PrivacyAccount,
    account_of,
    check_accountant,
    epsilon,
    words,
)
from dilocox.coordinator.metrics.run_metrics import RunMetrics
from dilocox.coordinator.server.event_log import NAME, EventLog
from dilocox.coordinator.server.events import Planned, Resumed
from dilocox.errors import ConfigError

pytestmark = pytest.mark.waits


def config(**privacy: Any) -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "r"},
            "model": {"path": "x"},
            "privacy": {"clip": 1.0, "noise": 4.0} | privacy,
            "sites": {"paris": {}, "lyon": {"data": "own"}, "nice": {"data": "own"}},
        }
    )


def plan(number: int, *members: str) -> dict[str, Any]:
    return {"round": number, "members": {member: {} for member in members}}


def phi(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize("noise", [0.7, 2.0, 9.0])
@pytest.mark.parametrize("contributions", [1, 11, 400])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_epsilon_solves_the_equation_of_balle_and_wang(
    noise: float, contributions: int, delta: float
) -> None:
    """Their theorem 8, of one Gaussian mechanism with the deviation of all of them together."""
    pytest.importorskip("dp_accounting")
    found = epsilon(noise, delta, contributions)
    deviation = noise / math.sqrt(contributions)
    a, b = 1 / (2 * deviation), found * deviation
    reached = phi(a - b) - math.exp(found + math.log(max(phi(-a - b), 1e-320)))
    assert reached == pytest.approx(delta, rel=1e-4)


def test_epsilon_is_below_that_of_the_renyi_accountant() -> None:
    accounting = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    for noise, count in ((1.0, 1), (2.0, 20), (8.0, 500)):
        bound = rdp.RdpAccountant()
        bound.compose(accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(noise), count))
        upper = bound.get_epsilon(1e-6)
        assert 0.8 * upper < epsilon(noise, 1e-6, count) <= upper


def test_no_noise_and_no_contributions() -> None:
    assert epsilon(0.0, 1e-6, 3) == math.inf
    assert epsilon(2.0, 1e-6, 0) == 0.0


def test_every_planned_contribution_counts_also_after_a_resume() -> None:
    pytest.importorskip("dp_accounting")
    account = PrivacyAccount(config())
    assert account.plan(plan(0, "paris")) is None
    for number in (0, 1, 2, 1, 2):
        record = account.plan(plan(number, "paris", "lyon"))
    assert record is not None
    assert record["kind"] == "privacy"
    assert record["round"] == 2
    assert record["sites"].keys() == {"lyon", "nice"}
    assert record["sites"]["lyon"]["contributions"] == 5
    assert record["sites"]["lyon"]["epsilon"] == epsilon(4.0, 1e-6, 5)
    assert record["sites"]["nice"] == {"contributions": 0, "epsilon": 0.0, "delta": 1e-6}


def test_a_round_whose_plan_a_resume_restores_counts_again(tmp_path: Path) -> None:
    """Its plan was made before the checkpoint was complete, so no new plan comes."""
    pytest.importorskip("dp_accounting")
    plans = [plan(0, "lyon", "paris"), plan(1, "lyon", "paris"), plan(2, "lyon", "paris")]
    log = EventLog(tmp_path)
    for each in plans:
        log.append(Planned(0.0, each))
    account = account_of(config(), tmp_path / NAME)
    assert account is not None
    # The checkpoint of the end of round 1 goes on in round 2, which is planned already.
    record = account.resumed(2, plans)
    assert record is not None
    assert (record["round"], record["sites"]["lyon"]["contributions"]) == (2, 4)
    # Of an earlier checkpoint the plan of round 2 is not restored: a new one comes, and counts.
    assert account.resumed(2, plans[:2]) is None
    assert account.figures()["lyon"]["contributions"] == 4
    log.append(Resumed(0.0, 8, 2, 0, plans))
    log.close()
    again = account_of(config(), tmp_path / NAME)
    assert again is not None
    assert again.figures()["lyon"]["contributions"] == 4


def test_the_event_log_has_the_plans_of_earlier_processes(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    log = EventLog(tmp_path)
    for number in (0, 1, 1):
        log.append(Planned(0.0, plan(number, "lyon", "paris")))
    log.close()
    account = account_of(config(), tmp_path / NAME)
    assert account is not None
    assert account.figures()["lyon"]["contributions"] == 3
    assert account_of(config(), tmp_path / "none") is not None
    (tmp_path / NAME).write_bytes(b"no database at all, but long enough to be read as one")
    with pytest.raises(ConfigError, match="its plans cannot be counted for privacy"):
        account_of(config(), tmp_path / NAME)


def test_a_run_without_private_sites_has_no_account(tmp_path: Path) -> None:
    assert account_of(config(clip=0.0, noise=0.0), tmp_path / NAME) is None


def test_metrics_and_summary_have_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    run, seen = config(), []
    metrics = RunMetrics(run, tmp_path, seen.append, PrivacyAccount(run))
    settings = dict.fromkeys(
        ("inner_steps", "slots", "fragments", "delay", "codec", "learning_rate", "momentum",
         "residual_decay", "residual_view", "keep", "first_step", "reason")
    )  # fmt: skip
    metrics.plan({**settings, **plan(0, "lyon"), "kind": "train"})
    metrics.plan({**settings, **plan(1, "lyon"), "kind": "flush"})
    summary = metrics.finish("finished", "")
    assert summary["privacy"]["lyon"]["contributions"] == 2
    assert json.loads((tmp_path / "summary.json").read_text())["privacy"] == summary["privacy"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [line["sites"]["lyon"] for line in lines if line["kind"] == "privacy"]
    assert [each["contributions"] for each in told] == [1, 2]


def test_the_words_of_the_figures() -> None:
    figures = {"contributions": 11, "epsilon": 3.9532, "delta": 1e-6}
    assert words(figures) == "epsilon 3.95 at delta 1e-06 after 11 contributions"
    none = {"contributions": 1, "epsilon": None, "delta": 1e-6}
    assert words(none) == "no epsilon after 1 contribution: privacy.noise is 0"
    for broken in (None, [], {}, {"contributions": "x", "epsilon": 1.0, "delta": 1.0}):
        assert words(broken) == "unreadable figures"


def test_a_coordinator_without_the_accountant_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_accountant(config(noise=0.0))
    check_accountant(config(clip=0.0, noise=0.0))
    with pytest.raises(ConfigError, match=r"pip install 'dilocox\[privacy\]'"):
        check_accountant(config())
