"""Invariant 5: a run that is stopped twice equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Run, Workshop

# A stop takes effect some two beats of slots later (the lease), so the run must outlast two.
SETS = ("outer.rounds=48", "checkpoint.every_rounds=0")


def model_bytes(run: Run) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted((run.folder / "model").glob("*.safetensors"))}


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("keep", ("outer.inner_steps=8",)),
        (
            "eager-reduce",
            ("outer.overlap=eager", "outer.fragments=1", "outer.exchange=reduce"),
        ),
        pytest.param("reduce", ("outer.exchange=reduce", "outer.delay=3"), marks=pytest.mark.slow),
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
