"""Trainers of transformers and TRL as the sites of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_operations import coordinate, flush_digests
from tests.e2e.test_own_loop import OWN, SETS
from tests.support.base_model import write_base
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import Workshop, verdicts

SCRIPT = str(Path(__file__).parents[1] / "support" / "hf_loop.py")
ADAPTERS = """\
[model]
path = "{base}"
[adapter]
rank = 4
"""


def trainers(
    forge: Forge, workshop: Workshop, words: list[str], kind: str, tmp_path: Path
) -> ForkedRun:
    """A run whose two sites are trainers, to its good end."""
    name = next(word for word in words if word.startswith("run.name=")).partition("=")[2]
    run = coordinate(forge, workshop, name, *words)
    sets = [word for word in words[1:] if word != "--set"]
    sites = []
    for site in ("paris", "lyon"):
        given = [SCRIPT, words[0], site, str(tmp_path / site), kind, *sets]
        sites.append(forge.command(workshop, name, "python", *given))
    assert [site.wait() for site in sites] == [0, 0], sites[0].printed() + sites[1].printed()
    assert run.wait() == 0, run.output()
    assert {site.last_line() for site in sites} == {"finished"}
    assert len(flush_digests(run)) == 1
    assert not verdicts(run.folder)
    return run


@pytest.mark.runs
def test_trainers_of_transformers_train_one_model(
    workshop: Workshop, forge: Forge, tmp_path: Path
) -> None:
    words = workshop.run_file("trainers", *SETS, *OWN, "outer.rounds=4")
    run = trainers(forge, workshop, words, "trainer", tmp_path)
    reports = run.records("round", "paris")
    assert [report["tokens"] for report in reports] == [8 * 4 * 32] * 4
    assert reports[-1]["loss"] < reports[0]["loss"] - 0.5


@pytest.mark.runs
@pytest.mark.slow
def test_trl_trains_adapters(workshop: Workshop, forge: Forge, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    model = ADAPTERS.format(base=write_base(workshop.root / "sft-base"))
    words = workshop.run_file(
        "sft", 'data.folder="{run}/data"', *SETS, *OWN, "outer.rounds=4", model=model
    )
    run = trainers(forge, workshop, words, "sft", tmp_path)
    reports = run.records("round", "paris")
    assert reports[-1]["loss"] < reports[0]["loss"]
    assert (run.folder / "model" / "adapter_model.safetensors").exists()
