"""The engine end to end: layouts, methods and overlap rules in real runs (docs/algorithm.md §6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.harness import PATIENT, Run, Workshop, verdicts

pytestmark = pytest.mark.runs

WHOLE_ROUND = (
    "outer.rounds=4",
    "outer.inner_steps=3",
    "outer.slots=1",
    "outer.fragments=1",
    "outer.delay=1",
    "compression.codec=none",
    "checkpoint.every_rounds=0",
    PATIENT,
)
"""With one slot a round, fragments of all stages have their boundaries at the same moment."""


def model_of(run: Run) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(run.folder / "model").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def one_stage(shared_workshop: Workshop) -> dict[str, torch.Tensor]:
    return model_of(shared_workshop.train("layout-1x1", *WHOLE_ROUND, "site.stages=1"))


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        pytest.param("2x1", ("site.stages=2",), marks=pytest.mark.slow),
        ("4x1", ("site.stages=4", "site.micro_batch_size=1")),
        pytest.param("1x2", ("site.stages=1", "site.shards=2"), marks=pytest.mark.slow),
        ("2x2-zero-bubble", (
            "site.stages=2", "site.shards=2", "site.micro_batch_size=1", "site.chunks=2",
            "site.schedule=zbv",
        )),
    ],
)  # fmt: skip
def test_every_layout_gives_the_same_anchor(
    workshop: Workshop, one_stage: dict[str, torch.Tensor], name: str, sets: tuple[str, ...]
) -> None:
    """Invariant 4: stages and shards change nothing but the order of sums."""
    run = workshop.train(f"layout-{name}", *WHOLE_ROUND, *sets)
    assert verdicts(run.folder) == {}, "the record replays every layout"
    cut = model_of(run)
    moved = max(float(tensor.abs().max()) for tensor in one_stage.values())
    assert moved > 0.01
    assert largest_difference(one_stage, cut) < 2e-4


def test_rounds_of_one_step_equal_synchronous_training(workshop: Workshop) -> None:
    """Invariant 3: no compression, H = 1, SGD, gamma = 1, mu = 0."""
    # Plans hand out token ranges by round: with rounds of one step both see the same batches.
    common = (
        "site.stages=1",
        "inner.optimizer=sgd",
        "inner.learning_rate=0.1",
        "inner.clip=0",
        "outer.rounds=12",
        "outer.inner_steps=1",
        "outer.fragments=1",
        PATIENT,
    )
    synchronous = workshop.train("synchronous", *common, "outer.method=allreduce")
    local = workshop.train(
        "local", *common, "outer.method=diloco", "outer.learning_rate=1", "outer.momentum=0"
    )
    assert largest_difference(model_of(synchronous), model_of(local)) < 2e-6
    first, last = synchronous.summary()["val_loss_first"], synchronous.summary()["val_loss_last"]
    assert last < first - 0.01


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("allreduce-reduce", ("outer.method=allreduce", "outer.exchange=reduce")),
        pytest.param("diloco", ("outer.method=diloco",), marks=pytest.mark.slow),
        pytest.param(
            "opendiloco",
            ("outer.method=opendiloco", "outer.fragments=2", "outer.slots=4"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "intellect1",
            ("outer.method=intellect1", "outer.exchange=reduce"),
            marks=pytest.mark.slow,
        ),
        ("naive", ("outer.overlap=naive", "outer.slots=2", "compression.codec=bf16")),
        ("keep-damped", ("outer.keep=0.65", "outer.delay=7", "sites.paris.batch_size=8")),
    ],
)
def test_methods_and_rules_train(workshop: Workshop, name: str, sets: tuple[str, ...]) -> None:
    """Every round ends with bit-identical anchors (the recorder refuses anything else)."""
    given = ("outer.fragments=1", "site.stages=1") if "fragments" not in "".join(sets) else ()
    run = workshop.train(
        name,
        "outer.inner_steps=8",
        *given,
        "outer.rounds=4",
        "checkpoint.every_rounds=0",
        PATIENT,
        *sets,
    )
    rounds = run.records("round")
    assert len(rounds) == 4
    assert all(record["sites"] == 2 for record in rounds)
    # allreduce has nothing to flush; the others exchange in each round.
    assert all(record["payload_bytes"] > 0 for record in rounds[1:])
    summary = run.summary()
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.2
    assert summary["payload_bytes"] > 0
    # Every outer step, from theta_0 and payloads, to the published model; gradients are not kept.
    gradients = {"commitments": "NOT_RUN", "replay": "NOT_RUN"}
    assert verdicts(run.folder) == (gradients if "allreduce" in name else {})
    if name == "allreduce-reduce":
        # 2(D-1)/D payloads of 4 bytes a parameter at each step, and the frames' headers.
        assert summary["ratio_per_token"] == pytest.approx(1.0, rel=0.06)


def test_a_single_site_is_the_same_code(workshop: Workshop) -> None:
    run = workshop.train("alone", "outer.rounds=3", PATIENT, sites=["paris"])
    summary = run.summary()
    assert summary["sites"] == 1
    assert verdicts(run.folder) == {}
    assert summary["payload_bytes"] == 0
    assert summary["allreduce_bytes"] == 0
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.1
