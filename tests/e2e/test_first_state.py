"""A founder that begins a run from another theta_0 than the run file says."""

from __future__ import annotations

import pytest

from tests.support.forge import Forge
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs


def test_sites_refuse_another_theta_0_and_verify_finds_it(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(
        workshop, "other-start", "outer.rounds=2", "site.stages=1", PATIENT,
        hooks="other-start", sites=("paris", "lyon", "rome"),
    )  # fmt: skip
    # Whoever is left trains alone.
    assert run.wait() == 0, run.output()
    text = run.printed()
    for site in ("lyon", "rome"):
        assert f"site {site}: paris begins the run from another state than run.seed gives" in text
        assert run.records("round", site) == []
    assert verdicts(run.folder) == {"start": "FAIL"}
