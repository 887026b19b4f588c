"""A site whose kernels are not deterministic is accused of nothing that it may have computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.neighbours import Neighbour, trained_in
from tests.tools.audit.test_cheats import here, rates_off_by, residual

from dilocox.record.log.audit_verdicts import Verdict
from dilocox.tools.audit import judge as judging
from dilocox.tools.audit import round_replay as replaying
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.audit.judge import Case, judge

Says = Callable[..., None]


@contextmanager
def at_the_flush(site: Neighbour) -> Iterator[None]:
    for state in site.outer.states:
        assert state.residual is not None
        state.residual.add_(0.1)
    yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_in(tmp_path_factory.mktemp("loose"), 2, {1: residual}, flush=at_the_flush)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Site and auditor are of the class that this is given, beside what is theirs."""

    def of_class(**facts: Any) -> None:
        begin, found, job = judging._signed_round, replaying.facts_here, judging._job

        def with_facts(began: Any, more: dict[str, Any]) -> Any:
            told = {**began.start.facts, **more}
            if more.get("device", "cpu") != "cpu":
                del told["threads"]
            return replace(began, start=replace(began.start, facts=told))

        monkeypatch.setattr(
            judging, "_signed_round", lambda *given: with_facts(begin(*given), facts)
        )
        monkeypatch.setattr(
            replaying, "facts_here", lambda *given: _without({**found(*given), **facts})
        )
        # It is repeated on this machine, in what that computes in.
        monkeypatch.setattr(
            judging, "_job",
            lambda case, began, plan: job(case, with_facts(began, {"precision": "float32"}), plan),
        )  # fmt: skip

    return of_class


def _without(facts: dict[str, Any]) -> dict[str, Any]:
    on_gpu = facts["device"] != "cpu"
    return {name: value for name, value in facts.items() if not (on_gpu and name == "threads")}


def audit(folder: Path, site: str, round_: int, **site_section: Any) -> Verdict:
    case: Case = AuditedRun(folder, (), None).case()
    section = case.config.site.model_copy(update=site_section)
    case = replace(case, config=case.config.model_copy(update={"site": section}))
    return judge(case, site, round_, here, lambda step: None)


GPU = {"device": "NVIDIA H100 80GB HBM3", "deterministic": False}


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, "EXACT"), (1e-6, "WITHIN_TOL"), (1e-2, "NOT_RUN")]
)
def test_in_fp32(
    trained: Path, says: Says, monkeypatch: pytest.MonkeyPatch, share: float, expected: str
) -> None:
    """What is alike speaks for the site; what is not says nothing, however large."""
    says(**GPU)
    rates_off_by(monkeypatch, share)
    verdict = audit(trained, "paris", 0)
    assert verdict.verdict == expected, verdict
    if share:
        assert "the site's kernels are not deterministic" in verdict.reason


def test_in_bf16(trained: Path, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    says(**GPU, precision="bfloat16")
    rates_off_by(monkeypatch, 1e-6)
    verdict = audit(trained, "paris", 0, precision="auto")
    assert verdict.verdict == "NOT_RUN", verdict
    assert "in bf16 honest differences say nothing" in verdict.reason


def test_what_it_tampers_with_elsewhere_is_found(trained: Path, says: Says) -> None:
    """A flush has no inner steps: no kernel of the model is in it."""
    says(**GPU)
    verdict = audit(trained, "lyon", 2)
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", -1), verdict


def test_a_processor_has_all_the_kernels_that_were_agreed_on(trained: Path, says: Says) -> None:
    """Who says otherwise gets no leniency by it, unless the run file asks for none."""
    says(deterministic=False)
    assert audit(trained, "lyon", 1).verdict == "MISMATCH"
    assert audit(trained, "lyon", 1, deterministic=False).verdict == "NOT_RUN"
    assert audit(trained, "paris", 1, deterministic=False).verdict == "EXACT"
