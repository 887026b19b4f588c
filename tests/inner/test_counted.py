"""The loss is the mean over the counted labels of the whole batch, however the batch is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dilocox.data.rows import NOT_COUNTED
from dilocox.inner import loss as loss_module
from dilocox.inner.counted import MicroBatchLoss
from dilocox.inner.head_loss import HeadLoss
from dilocox.inner.loss import mean_cross_entropy, sum_cross_entropy
from tests.support.counted_cases import OVER_SITES, own_mean, own_sums
from tests.support.worker_pool import Pool

pytestmark = pytest.mark.waits

SPLITS: list[dict[str, Any]] = [
    {"micro": 8},
    {"micro": 1},
    {"micro": 2, "tied": True},
    {"shards": 2, "micro": 2},
    {"shards": 2, "micro": 1, "whole_gradients": True},
    {"replicas": 2, "micro": 1},
    {"stages": 2, "schedule": "gpipe", "micro": 2},
    {"stages": 2, "schedule": "1f1b", "tied": True, "micro": 2},
    {"stages": 2, "schedule": "interleaved-1f1b", "micro": 2},
    {"stages": 2, "schedule": "interleaved-zero-bubble", "micro": 2},
    {"stages": 2, "schedule": "zbv", "micro": 2},
    {"stages": 2, "shards": 2, "schedule": "1f1b"},
]


ONE_OF_A_KIND = (SPLITS[1], SPLITS[4], SPLITS[5], SPLITS[7], SPLITS[9], SPLITS[11])
"""One rank, shards, replicas, a pipeline, one that splits the backward pass, and shards in a
pipeline."""


def kept(settings: list[dict[str, Any]]) -> list[Any]:
    """Those of which there is no other of the kind; the rest is slow."""
    return [
        each if each in ONE_OF_A_KIND else pytest.param(each, marks=pytest.mark.slow)
        for each in settings
    ]


def named(setting: dict[str, Any]) -> str:
    return "-".join(f"{key}-{value}" for key, value in setting.items())


def check(pool: Pool, name: str, setting: dict[str, Any], **how: Any) -> None:
    firsts = setting.get("stages", 1) * setting.get("shards", 1)
    ranks = firsts * setting.get("replicas", 1)
    case = ("tests.support.counted_cases", "gradients")
    for result in pool.run(ranks, *case, name=name, rows=8, **setting, **how)[:firsts]:
        assert result["worst"] < 3e-6
        for found, wanted in result["losses"]:
            assert found == pytest.approx(wanted, rel=3e-6, abs=5e-7)


@pytest.mark.parametrize("setting", SPLITS, ids=named)
def test_gradients_equal_float64_however_the_batch_is_split(
    pool: Pool, setting: dict[str, Any]
) -> None:
    check(pool, "built in", setting)


@pytest.mark.parametrize(
    ("name", "told", "setting"),
    [
        ("own mean", True, SPLITS[11]),
        ("own sums", True, SPLITS[5]),
        ("own sums", False, SPLITS[1]),
        ("own sums", False, SPLITS[11]),
        pytest.param("own mean", True, SPLITS[1], marks=pytest.mark.slow),
        pytest.param("own mean", True, SPLITS[5], marks=pytest.mark.slow),
        pytest.param("own sums", True, SPLITS[1], marks=pytest.mark.slow),
        pytest.param("own sums", True, SPLITS[11], marks=pytest.mark.slow),
        pytest.param("own sums", False, SPLITS[5], marks=pytest.mark.slow),
    ],
    ids=lambda each: named(each) if isinstance(each, dict) else str(each),
)
def test_own_losses_count_alike(pool: Pool, name: str, told: bool, setting: dict[str, Any]) -> None:
    """A loss that gives sum and count need not be told how many labels there are."""
    check(pool, name, setting, told=told)


@pytest.mark.parametrize("setting", kept(SPLITS[:6] + SPLITS[7:]), ids=named)
def test_pairs_of_answers_count_alike_however_the_batch_is_split(
    pool: Pool, setting: dict[str, Any]
) -> None:
    """The loss is the mean over the pairs of the whole batch, as in float64 by hand."""
    check(pool, "dpo", setting)


@pytest.mark.parametrize("setting", kept(SPLITS[4:6] + SPLITS[7:]), ids=named)
def test_columns_reach_the_loss_however_the_batch_is_split(
    pool: Pool, setting: dict[str, Any]
) -> None:
    check(pool, "own columns", setting)


@pytest.mark.parametrize(
    "setting",
    [SPLITS[1], pytest.param(SPLITS[3], marks=pytest.mark.slow), SPLITS[11]],
    ids=named,
)
@pytest.mark.parametrize("name", OVER_SITES)
def test_gradients_averaged_over_sites_count_every_label_alike(
    pool: Pool, name: str, setting: dict[str, Any]
) -> None:
    """Two sites of unequal counts and weights; each reports the loss of its own batch."""
    ranks = setting.get("stages", 1) * setting.get("shards", 1)
    case = ("tests.support.counted_cases", "over_sites")
    for result in pool.run(ranks, *case, name=name, **setting):
        assert result["counts"][0] > 1.2 * result["counts"][1]
        assert result["worst"] < 3e-6
        for found, wanted in result["losses"]:
            assert found == pytest.approx(wanted, rel=3e-6)


@pytest.mark.parametrize("small", [False, True], ids=["at once", "in parts"])
def test_sums_without_labels_are_zero_and_so_is_the_gradient(
    monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    if small:
        monkeypatch.setattr(loss_module, "AT_ONCE", 32)
        monkeypatch.setattr("dilocox.inner.head_loss.AT_ONCE", 32)
        monkeypatch.setattr("dilocox.inner.head_loss.CHUNK", {"cpu": 48})
    draw = torch.Generator().manual_seed(0)
    head = torch.randn(11, 4, generator=draw).requires_grad_()
    hidden = torch.randn(2, 9, 4, generator=draw).requires_grad_()
    labels = torch.randint(11, (2, 9), generator=draw)
    some = torch.where(torch.arange(9) % 3 > 0, labels, NOT_COUNTED)

    def in_parts(targets: Tensor) -> Tensor:
        return HeadLoss(summed=True)(lambda h: h @ head.T, hidden, targets, [head], 11)

    def at_once(targets: Tensor) -> Tensor:
        return sum_cross_entropy(hidden @ head.T, targets)

    def wanted(targets: Tensor) -> Tensor:
        logits = (hidden.double() @ head.double().T).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")

    for targets in (labels, some, torch.full_like(labels, NOT_COUNTED)):
        expected = wanted(targets)
        slopes = torch.autograd.grad(expected, [hidden, head])
        for loss in (in_parts, at_once):
            found = loss(targets)
            assert found.item() == pytest.approx(expected.item(), rel=1e-6)
            for one, other in zip(torch.autograd.grad(found, [hidden, head]), slopes, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    mean = mean_cross_entropy(hidden @ head.T, some)
    assert mean.item() == pytest.approx(wanted(some).item() / int((some >= 0).sum()), rel=1e-6)


def test_a_loss_without_labels_is_zero_and_its_gradient_is_finite() -> None:
    logits = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    nothing = torch.full((1, 5), NOT_COUNTED)
    assert torch.isnan(own_mean(logits, nothing))
    for own in (own_mean, own_sums):
        loss = MicroBatchLoss(own)
        found = loss(logits, nothing, 1, 0.25)
        (slope,) = torch.autograd.grad(found, [logits])
        assert float(found) == 0.0
        assert not slope.any()
        assert float(loss.take_count(logits.device)) == 0.0


CASE = ("tests.support.site_model_cases", "real_model")


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    """Packed rows in one rank. They train other than rows that are not packed."""
    plain = {"stages": 1, "shards": 1, "schedule": "1f1b"}
    (found,) = pool.run(1, *CASE, **plain, packed=True)
    (stream,) = pool.run(1, *CASE, **plain)
    assert found["values"] != pytest.approx(stream["values"], rel=1e-3)
    return found


@pytest.mark.parametrize(
    ("stages", "shards", "schedule", "head_chunk"),
    [
        (1, 2, "1f1b", None),
        (1, 1, "1f1b", 128),
        pytest.param(2, 1, "gpipe", None, marks=pytest.mark.slow),
        (2, 2, "1f1b", 128),
        (2, 1, "interleaved-zero-bubble", None),
        (2, 1, "zbv", None),
    ],
)
def test_packed_rows_train_alike_in_every_layout(
    pool: Pool,
    alone: dict[str, Any],
    stages: int,
    shards: int,
    schedule: str,
    head_chunk: int | None,
) -> None:
    """Positions reach every stage, and go with the rows of their micro-batch."""
    split = {"stages": stages, "shards": shards, "schedule": schedule, "head_chunk": head_chunk}
    for found in pool.run(stages * shards, *CASE, **split, packed=True):
        assert found["values"] == pytest.approx(alone["values"], rel=1e-5)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("empty", [(1, 2), (4, 5, 6, 7)])
def test_the_processes_of_a_loop_of_ones_own_weigh_by_their_labels(
    pool: Pool, empty: tuple[int, ...], own: bool
) -> None:
    """Held-out rows have unequal numbers of labels, and one process may have no label at all."""
    for found, expected in pool.run(
        2, "tests.support.loop_cases", "held_out", empty=empty, own=own
    ):
        assert found == pytest.approx(expected, rel=1e-6)
