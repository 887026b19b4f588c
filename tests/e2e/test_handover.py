"""A run that goes on with other sites, stages and shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from dilocox.config.handover import MOMENTUM
from dilocox.training.portable_checkpoint import Handover
from tests.support.forge import Forge
from tests.support.harness import Workshop, verdicts

pytestmark = pytest.mark.stops

SETS = ("outer.rounds=30", "outer.momentum=0.5", "checkpoint.every_rounds=3")
STEPS = 128
"""Inner steps of the runs that go on."""


def hand_over(workshop: Workshop, forge: Forge, name: str, folder: Path) -> Handover:
    """The newest checkpoint of a run, as its user would hand it over."""
    run = forge.command(workshop, name, "handover", str(workshop.folder(name)), "--to", str(folder))
    assert run.wait() == 0, run.output()
    assert "residuals, inner moments and exchanges that had not landed" in run.printed()
    return Handover.read(folder)


@pytest.mark.slow
def test_a_run_goes_on_with_other_sites_stages_and_shards(
    workshop: Workshop, forge: Forge, tmp_path: Path
) -> None:
    old = workshop.start("old", *SETS)
    old.until_round(6)
    old.interrupt()
    assert old.wait() == 130, old.output()
    start = tmp_path / "start"
    found = hand_over(workshop, forge, "old", start)
    assert 48 <= found.steps < STEPS
    momenta = load_file(start / MOMENTUM)
    assert all(bool(tensor.any()) for tensor in momenta.values())
    assert len(momenta) == len(load_file(old_anchor(start, 0))) + len(
        load_file(old_anchor(start, 1))
    )

    model = f'[model]\npath = "{start}"\nhandover = true\n'
    losses = []
    for name, sites, more in (
        ("three-sites", ("paris", "lyon", "oslo"), ("site.stages=1",)),
        (
            "shards",
            ("lyon", "rome"),
            ("site.stages=1", "site.shards=2", "outer.momentum_dtype=bf16"),
        ),
    ):
        words = workshop.run_file(
            name, *SETS, f"outer.rounds={STEPS // 8}", *more, sites=sites, model=model
        )
        new = forge.command(workshop, name, "train", *words)
        assert new.wait(280.0) == 0, new.output()
        assert found.line in new.printed()
        summary = new.summary()
        losses.append((summary["val_loss_first"], summary["val_loss_last"]))
        # Steps that the old run has taken are not taken again, and its text is not read again.
        assert new.records()[-1]["step"] == STEPS
        assert new.records()[0]["step"] == found.steps + 8
        assert new.sequences_amiss() == (0, 0)
        before = sum(entry["count"] for entry in found.ledger["entries"])
        per_step = 4 * len(sites)
        assert summary["sequences_committed"] == before + per_step * (STEPS - found.steps)
        # The record begins with anchor and momentum, and leads from there to the model.
        assert verdicts(new.folder) == {}
    first = {round(loss, 4) for loss, _ in losses}
    assert len(first) == 1, "both go on from one anchor"
    assert old.summary()["val_loss_first"] - 0.5 > losses[0][0] > losses[0][1]

    words = workshop.run_file(
        "short", *SETS, "outer.rounds=3", "site.stages=1", sites=("paris",), model=model
    )
    short = forge.command(workshop, "short", "train", *words)
    assert short.wait() == 1
    assert f"and run old has taken {found.steps} already" in short.printed()


def old_anchor(start: Path, stage: int) -> Path:
    """A stage's file of the handed over model."""
    return start / f"model-{stage + 1:05d}-of-00002.safetensors"
