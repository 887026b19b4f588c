"""Invariant 5: a run that is stopped twice equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Run, Workshop, verdicts

# A stop takes effect some two beats of slots later (the lease), so the run must outlast two.
SETS = ("outer.rounds=48", "checkpoint.every_rounds=0")


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_is_named(workshop: Workshop) -> None:
    """The founder may not go on from fresh weights when its part of the checkpoint is missing."""
    sets = ("outer.rounds=200", "checkpoint.every_rounds=0")
    run = workshop.start("gone", *sets)
    run.until_round(1)
    run.interrupt()
    assert run.wait() == 130, run.output()
    for part in (run.folder / "checkpoints").glob("tick-*/paris"):
        part.rename(run.folder.parent / "moved-away")
    again = workshop.start("gone", *sets, flags=("--resume",))
    assert again.wait() == 1
    assert "site paris holds no whole part of the checkpoint" in again.printed()
    assert "Traceback" not in again.printed()


def model_bytes(run: Run) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted((run.folder / "model").glob("*.safetensors"))}


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        # Lyon takes 3.2 steps of paris's 8: three or four a round.
        (
            "keep",
            (
                "outer.inner_steps=8",
                "outer.momentum_dtype=bf16",
                "compression.codec=topk:64",
                "sites.lyon.speed=0.4",
            ),
        ),
        pytest.param(
            "eager-reduce",
            ("outer.overlap=eager", "outer.fragments=1", "outer.exchange=reduce"),
            marks=pytest.mark.slow,
        ),
        pytest.param("reduce", ("outer.exchange=reduce", "outer.delay=3"), marks=pytest.mark.slow),
        pytest.param(
            "low-rank",
            ("outer.method=dilocox-paper", "compression.codec=lowrank:2", "outer.fragments=1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "late-gradients",
            ("outer.method=cocktailsgd", "outer.fragments=1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_stops_change_nothing(workshop: Workshop, name: str, sets: tuple[str, ...]) -> None:
    whole = workshop.train(f"whole-{name}", *SETS, *sets)
    cut = workshop.start(f"cut-{name}", *SETS, *sets)
    cut.until_round(1)
    cut.interrupt()
    assert cut.wait() == 130, cut.output()
    assert "--resume" in cut.printed()
    stopped_at = len(cut.records())
    again = workshop.start(f"cut-{name}", *SETS, *sets, flags=("--resume",))
    again.until(lambda: len(again.records()) > stopped_at)
    again.interrupt()
    assert again.wait() == 130, again.output()
    last = workshop.start(f"cut-{name}", *SETS, *sets, flags=("--resume",))
    assert last.wait() == 0, last.output()
    assert model_bytes(last) == model_bytes(whole)
    assert last.summary()["anchor_digest"] == whole.summary()["anchor_digest"]
    assert last.summary()["val_loss_last"] == whole.summary()["val_loss_last"]
    assert last.summary()["tokens"] == whole.summary()["tokens"]
    # The record tells the course that was gone on with, and replays to that model.
    assert verdicts(last.folder) == ({"replay": "NOT_RUN"} if name == "late-gradients" else {})
