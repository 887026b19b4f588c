"""Values that are not finite: whose they are is said, and the run goes on without them."""

from __future__ import annotations

import pytest

from tests.support.forge import Forge
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

ONE_STAGE = ("site.stages=1", "checkpoint.every_rounds=1", PATIENT)
FAILS = "network.heartbeat=10"
"""For runs that fail: their coordinator answers for two more beats, fifths of this."""


def test_a_sick_round_is_dropped_and_the_run_goes_on(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(workshop, "sick-once", "outer.rounds=4", PATIENT, hooks="sick-once")
    assert run.wait() == 0, run.output()
    culprit = "stage 0, shard 0: gradient of model.embed_tokens.weight"
    lyon = {record["round"]: record for record in run.records("round", "lyon")}
    assert [r for r, record in lyon.items() if record.get("dropped") == culprit] == [1]
    assert not any("dropped" in record for record in run.records("round", "paris"))
    # Left out of this round's exchanges only; the last of them lands in the next.
    assert [lyon[r]["contributors"] for r in range(4)] == [2, 1, 1, 2]
    # The loss is that of the steps that were taken; no round is missing.
    assert [record["round"] for record in run.records()] == [0, 1, 2, 3]
    assert all(3.0 < record["loss"] < 6.0 for record in run.records())
    said = f"lyon, round 1: {culprit} is not finite"
    assert said in run.printed()
    log = (run.folder / "logs" / "lyon-stage1-shard0.log").read_text()
    assert f"site {said}" in log
    digests = {r["anchor_digest"] for r in run.records("flush", "paris")}
    assert digests == {r["anchor_digest"] for r in run.records("flush", "lyon")}
    assert run.summary()["val_loss_last"] < run.summary()["val_loss_first"] - 0.5
    assert verdicts(run.folder) == {}, "sets without it are replayed as well"


@pytest.mark.slow
def test_two_sick_rounds_end_the_run_which_can_be_resumed(workshop: Workshop, forge: Forge) -> None:
    sets = ("outer.rounds=6", *ONE_STAGE, FAILS)
    run = forge.train(workshop, "sick-twice", *sets, hooks="sick-twice")
    assert run.wait() == 1, run.output()
    assert "site lyon, round 3: stage 0, shard 0: gradient of model." in run.last_line()
    assert "second round in a row" in run.last_line()
    assert "Traceback" not in run.printed()
    assert not run.left_behind()
    healthy = forge.train(workshop, "sick-twice", *sets, flags=("--resume",))
    assert healthy.wait() == 0, healthy.output()
    assert healthy.summary()["rounds"] == 6
    # From the checkpoint after round 2 on, whose record of the sick round is not lost.
    dropped = [r["round"] for r in healthy.records("round", "lyon") if "dropped" in r]
    assert dropped == [2]
    assert [r["round"] for r in healthy.records()][-3:] == [3, 4, 5]


@pytest.mark.parametrize(
    ("hooks", "stages", "what"),
    [
        pytest.param(
            "sick-alone",
            1,
            "stage 0, shard 0: gradient of model.embed_tokens.weight",
            marks=pytest.mark.slow,
        ),
        ("poisoned-alone", 2, "stage 0: pseudo-gradient of model.embed_tokens.weight[9571]"),
    ],
)
def test_a_site_alone_ends_with_one_line(
    workshop: Workshop, forge: Forge, hooks: str, stages: int, what: str
) -> None:
    sets = ("outer.rounds=4", "checkpoint.every_rounds=1", f"site.stages={stages}", FAILS)
    run = forge.train(workshop, hooks, *sets, hooks=hooks, sites=("paris",))
    assert run.wait() == 1, run.output()
    assert "site paris, round 1: " in run.last_line()
    assert f"{what} is not finite" in run.last_line()


def test_a_poisoned_pseudo_gradient_is_dropped(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(workshop, "poisoned", "outer.rounds=3", PATIENT, hooks="poisoned")
    assert run.wait() == 0, run.output()
    dropped = {r["round"]: r["dropped"] for r in run.records("round", "lyon") if "dropped" in r}
    assert dropped == {1: "stage 0: pseudo-gradient of model.embed_tokens.weight[9571]"}
    assert all("loss" in record for record in run.records("round", "lyon"))


def test_synchronous_training_leaves_a_sick_site_out(workshop: Workshop, forge: Forge) -> None:
    sets = ("outer.rounds=4", *ONE_STAGE, "outer.method=allreduce", "outer.fragments=1",
            "outer.inner_steps=8")  # fmt: skip
    run = forge.train(workshop, "sick-synchronous", *sets, hooks="sick-once")
    assert run.wait() == 0, run.output()
    assert [r["round"] for r in run.records("round", "lyon") if "dropped" in r] == [1]
    paris = [r["anchor_digest"] for r in run.records("round", "paris")]
    assert paris == [r["anchor_digest"] for r in run.records("round", "lyon")]
    assert len(set(paris)) == 4
