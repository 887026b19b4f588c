"""Lightning modules as the sites of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_operations import coordinate, flush_digests
from tests.e2e.test_own_loop import OWN, SETS
from tests.support.forge import Forge
from tests.support.harness import Workshop, verdicts

pytestmark = pytest.mark.runs
SCRIPT = str(Path(__file__).parents[1] / "support" / "lightning_loop.py")


def test_modules_train_one_model(workshop: Workshop, forge: Forge) -> None:
    """One site accumulates, the other has two optimizers in manual optimization."""
    pytest.importorskip("lightning")
    words = workshop.run_file("lightning", *SETS, *OWN, "outer.rounds=4")
    run = coordinate(forge, workshop, "lightning", *words)
    sets = [word for word in words[1:] if word != "--set"]
    sites = [
        forge.command(workshop, "lightning", "python", SCRIPT, words[0], site, kind, *sets)
        for site, kind in (("paris", "automatic"), ("lyon", "manual"))
    ]
    assert [site.wait() for site in sites] == [0, 0], sites[0].printed() + sites[1].printed()
    assert run.wait() == 0, run.output()
    assert {site.last_line() for site in sites} == {"finished"}
    assert len(flush_digests(run)) == 1
    for name, rows in (("paris", 4), ("lyon", 2)):
        reports = run.records("round", name)
        assert [report["tokens"] for report in reports] == [8 * rows * 33] * 4
        assert reports[-1]["loss"] < reports[0]["loss"] - 0.5
    assert not verdicts(run.folder)
