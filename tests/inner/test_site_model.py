"""A site of several processes trains as one process would, for every schedule and sharding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dilocox.config.site import InnerSection
from tests.support.architectures import ARCHITECTURES, BUFFERS
from tests.support.grids import pairs_of
from tests.support.worker_pool import Pool

pytestmark = pytest.mark.waits

SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]


@pytest.mark.parametrize(
    ("schedule", "shards", "checkpointing", "tied"),
    pairs_of(SCHEDULES, [1, 2], [False, True], [False, True], rest=pytest.mark.slow),
)
def test_gradients_equal_single_process(
    pool: Pool, schedule: str, shards: int, checkpointing: bool, tied: bool
) -> None:
    setting = {
        "stages": 2,
        "shards": shards,
        "schedule": schedule,
        "checkpointing": checkpointing,
        "tied": tied,
        "rows": 4 * shards,
    }
    check_gradients(pool, 2 * shards, setting)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble", "zbv"])
def test_gradients_equal_single_process_over_four_stages(pool: Pool, schedule: str) -> None:
    check_gradients(pool, 4, {"stages": 4, "schedule": schedule, "rows": 8, "tied": True})


@pytest.mark.parametrize(
    ("shards", "tied"),
    [
        (1, False),
        (1, True),
        (2, False),
        (4, True),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_single_process_in_one_stage(pool: Pool, shards: int, tied: bool) -> None:
    check_gradients(pool, shards, {"shards": shards, "rows": 8, "tied": tied})


@pytest.mark.parametrize(
    ("shards", "checkpointing"),
    [
        (2, False),
        (2, True),
        (4, True),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_reduced_once_per_step_equal_single_process(
    pool: Pool, shards: int, checkpointing: bool
) -> None:
    setting = {"shards": shards, "rows": 2 * shards, "checkpointing": checkpointing}
    check_gradients(pool, shards, {**setting, "whole_gradients": True})


def test_a_step_gathers_and_reduces_once_where_gradients_are_whole(pool: Pool) -> None:
    """Seven units: embedding, five layers, norm with head. Embedding and closing unit are gathered
    once per micro-batch in any case, layers for the backward pass again."""
    each, once = (
        pool.run(2, "tests.support.site_model_cases", "messages", shards=2, whole_gradients=whole)[
            0
        ]
        for whole in (False, True)
    )
    assert each["reductions"] == 4 * 7
    assert each["gathers"] >= 4 * 7 + 4 * 4
    assert once["reductions"] == 7
    assert once["gathers"] <= each["gathers"] - (3 * 7 + 4 * 4)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_gathered_when_they_are_needed(pool: Pool, tied: bool) -> None:
    """The embedding for the beginning, norm and head for the end; tied ones all along."""
    found = pool.run(2, "tests.support.site_model_cases", "gathered_when", tied=tied, shards=2)[0]
    held = ["embed", "norm", "head"] if tied else []
    closed = held or ["norm", "head"]
    assert found["embed"] == (held or ["embed"])
    in_order = ["embed", "first", "last", "norm", "head"]
    assert found["first"] == [name for name in in_order if name in (*held, "first")]
    assert found["norm"] == found["head"] == [name for name in in_order if name in closed]
    assert [n for n in found["backward of first"] if n in ("embed", "norm", "head")] == held
    assert found["between steps"] == []


@pytest.mark.parametrize("stages", [1, 2])
def test_a_head_may_be_used_without_a_call(pool: Pool, stages: int) -> None:
    """As a loss does that takes its weight, or computes part by part: norm and head are one unit
    whatever is called of it."""
    setting = {"stages": stages, "shards": 2, "rows": 4, "steps": 2}
    called = pool.run(2 * stages, "tests.support.site_cases", "trained", **setting)
    taken = pool.run(2 * stages, "tests.support.site_cases", "trained", head_in_parts=2, **setting)
    for one, other in zip(called, taken, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        for name, tensor in one["tensors"].items():
            np.testing.assert_allclose(other["tensors"][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "tied"),
    [
        (0, False),
        (1, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_shards_of_every_model_type_train_as_one_rank(pool: Pool, first: int, tied: bool) -> None:
    """Every second type from `first` on: how a head is tied hangs on no model type."""
    names = list(ARCHITECTURES)[first::2]
    case = ("tests.support.site_model_cases", "model_types")
    (alone,) = pool.run(1, *case, shards=1, tied=tied, names=names)
    sharded = pool.run(2, *case, shards=2, tied=tied, names=names)[0]
    assert list(sharded) == list(alone) == names
    for name, values in alone.items():
        assert sharded[name] == pytest.approx(values, rel=1e-4), name


@pytest.mark.parametrize(
    "setting",
    [
        {"replicas": 2, "rows": 4},
        {"replicas": 2, "rows": 4, "tied": True, "whole_gradients": True},
        {"replicas": 2, "shards": 2, "rows": 8},
        pytest.param({"replicas": 2, "stages": 2, "rows": 8, "tied": True}, marks=pytest.mark.slow),
        {"replicas": 2, "stages": 2, "rows": 8, "schedule": "interleaved-zero-bubble"},
    ],
    ids=lambda setting: "-".join(map(str, setting.values())),
)
def test_replicas_train_as_one_process(pool: Pool, setting: dict[str, Any]) -> None:
    ranks = setting["replicas"] * setting.get("shards", 1) * setting.get("stages", 1)
    results = pool.run(ranks, "tests.support.site_cases", "gradients", **setting)
    for result in results[: ranks // 2]:
        assert result["worst"] < 2e-6
        for mine, single in result["norms"] + result["losses"]:
            assert mine == pytest.approx(single, rel=2e-6)
    assert all(result["kept"] == 0 for result in results)


def test_replicas_exchange_gradients_once_per_step(pool: Pool) -> None:
    """Seven units, see above. Shards reduce them in each of four micro-batches."""
    found = pool.run(4, "tests.support.site_model_cases", "messages", shards=2, replicas=2)[0]
    assert found["reductions"] == 4 * 7
    assert found["sums"] == 7


MUON = {"shards": 2, "inner": InnerSection(optimizer="muon")}
BF16 = {"shards": 2, "precision": torch.bfloat16}
TIED = {"stages": 2, "tied": True}


@pytest.mark.parametrize(
    ("setting", "exchange"),
    [
        pytest.param(MUON, False, id="muon"),
        pytest.param(BF16, True, id="bf16-exchange"),
        pytest.param(TIED, False, id="tied", marks=pytest.mark.slow),
        pytest.param(TIED, True, id="tied-exchange"),
        pytest.param(MUON, True, id="muon-exchange", marks=pytest.mark.slow),
        pytest.param(BF16, False, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_replicas_end_with_the_same_bits(
    pool: Pool, setting: dict[str, Any], exchange: bool
) -> None:
    """Whatever is written at the first replica's ranks, the same ranks of the others get it."""
    results = pool.run(
        4, "tests.support.site_cases", "trained", replicas=2, exchange=exchange, **setting
    )
    for first, other in zip(results[:2], results[2:], strict=True):
        assert first["remains"].keys() == other["remains"].keys()
        for name, tensor in first["remains"].items():
            assert np.array_equal(tensor, other["remains"][name]), name


def check_gradients(pool: Pool, ranks: int, setting: dict[str, Any]) -> None:
    results = pool.run(ranks, "tests.support.site_cases", "gradients", **setting)
    for result in results:
        assert result["worst"] < 2e-6
        assert result["kept"] == 0
        for mine, single in result["norms"] + result["losses"]:
            assert mine == pytest.approx(single, rel=2e-6)
    # Not only close to the reference: the same bits on every rank.
    assert len({str((r["norms"], r["losses"])) for r in results}) == 1


def whole(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The whole model's tensors from all ranks' shards, put together in rank order."""
    parts: dict[str, list[np.ndarray]] = {}
    for result in results:
        for name, tensor in result["tensors"].items():
            parts.setdefault(name, []).append(tensor)
    return {name: np.concatenate(tensors) for name, tensors in parts.items()}


TRAINED = [
    (2, 1, "gpipe"),
    (4, 1, "1f1b"),
    (1, 4, "1f1b"),
    (2, 2, "interleaved-zero-bubble"),
    (2, 2, "zbv"),
]
"""Pipelines that split the backward pass and such that do not, shards, and both."""
MORE = [
    (1, 2, "1f1b"),
    (2, 2, "1f1b"),
    (2, 2, "interleaved-1f1b"),
    (2, 1, "zbv"),
]


@pytest.mark.parametrize(
    ("tied", "layouts"),
    [
        pytest.param(True, TRAINED, id="tied"),
        pytest.param(True, MORE, id="tied-more", marks=pytest.mark.slow),
        pytest.param(False, TRAINED + MORE, id="untied", marks=pytest.mark.slow),
    ],
)
def test_training_is_the_same_in_every_layout(
    pool: Pool, tied: bool, layouts: list[tuple[int, int, str]]
) -> None:
    single = pool.run(1, "tests.support.site_cases", "trained", tied=tied)
    wanted = whole(single)
    for stages, shards, schedule in layouts:
        results = pool.run(
            stages * shards,
            "tests.support.site_cases",
            "trained",
            stages=stages,
            shards=shards,
            schedule=schedule,
            tied=tied,
        )
        found = whole(results)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            np.testing.assert_allclose(found[name], tensor, atol=2e-5, err_msg=name)
        for key in ("losses", "norms", "evaluated", "halved"):
            assert results[0][key] == pytest.approx(single[0][key], rel=2e-5)
            assert all(result[key] == results[0][key] for result in results)
        assert results[0]["halved"] != results[0]["evaluated"]
        if tied and stages > 1:
            check_tied(results)


def check_tied(results: list[dict[str, Any]]) -> None:
    """Owner and copy hold the same bits after training, and after a landing wrote the owner."""
    name = "model.embed_tokens.weight"
    owners = {
        r["shard"]: (r["tensors"][name], r["owner_after"]) for r in results if name in r["tensors"]
    }
    copies = {r["shard"]: (r["copy"], r["copy_after"]) for r in results if r["copy"] is not None}
    assert owners.keys() == copies.keys()
    assert all("lm_head.weight" not in result["tensors"] for result in results)
    for shard, (trained, landed) in owners.items():
        np.testing.assert_array_equal(landed, copies[shard][1])
        np.testing.assert_array_equal(trained, copies[shard][0])


def test_exchanged_gradients_reach_both_tied_copies(pool: Pool) -> None:
    single = pool.run(1, "tests.support.site_cases", "trained", tied=True, exchange=True)
    results = pool.run(
        2,
        "tests.support.site_cases",
        "trained",
        stages=2,
        tied=True,
        exchange=True,
        schedule="1f1b",
    )
    plain = pool.run(1, "tests.support.site_cases", "trained", tied=True)
    assert single[0]["norms"][0] == pytest.approx(2 * plain[0]["norms"][0])
    assert results[0]["norms"] == pytest.approx(single[0]["norms"], rel=2e-5)
    check_tied(results)
    for name, tensor in whole(single).items():
        np.testing.assert_allclose(whole(results)[name], tensor, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("stages", "shards", "schedule"), [(1, 1, "1f1b"), (2, 1, "1f1b"), (2, 2, "zbv")]
)
def test_optimizer_state_is_exact(pool: Pool, stages: int, shards: int, schedule: str) -> None:
    for result in pool.run(
        stages * shards,
        "tests.support.site_cases",
        "resumed",
        stages=stages,
        shards=shards,
        schedule=schedule,
        tied=True,
    ):
        assert result["tensors"]
        assert result["state"]
        assert result["moved"]
        assert result["step"] == 4.0
        assert "step" in result["keys"]
        assert any(key.startswith("exp_avg_sq/model.layers.") for key in result["keys"])


def test_saved_buffers_stay_as_they_were_and_are_whole_at_every_shard(pool: Pool) -> None:
    results = pool.run(4, "tests.support.site_model_cases", "saved_buffers", stages=2, shards=2)
    assert results[0] == results[1]
    assert results[2] == results[3]
    expected = [[pytest.approx(0.3 + number)] * 4 for number in range(len(BUFFERS))]
    assert results[0] | results[2] == dict(zip(BUFFERS, expected, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble"])
@pytest.mark.parametrize("shards", [1, 2])
def test_missing_gradient_is_an_error_on_every_rank(pool: Pool, schedule: str, shards: int) -> None:
    errors = pool.run(
        2 * shards,
        "tests.support.site_cases",
        "unused_parameter",
        stages=2,
        shards=shards,
        schedule=schedule,
        rows=4 * shards,
        unused=1,
    )
    assert len(set(errors)) == 1
    assert errors[0].startswith("stage 1: model.unused got no gradient")


@pytest.mark.parametrize("place", [float("nan"), float("inf")])
@pytest.mark.parametrize("shards", [1, 2])
def test_non_finite_gradient_skips_the_step_and_is_named(
    pool: Pool, shards: int, place: float
) -> None:
    name = "model.layers.3.down.weight"
    for result in pool.run(
        2 * shards,
        "tests.support.site_cases",
        "spoiled",
        name=name,
        place=place,
        stages=2,
        shards=shards,
        rows=4 * shards,
    ):
        assert result["finite"] == (False, True)
        assert result["culprit"] == (f"stage 1, shard 0: gradient of {name}", None)
        assert result["kept"]
        assert result["step"] == 0.0
        assert result["moved"]


def test_non_finite_loss_skips_the_step(pool: Pool) -> None:
    results = pool.run(2, "tests.support.site_cases", "poisoned_weight", stages=2, shards=1, rows=4)
    assert {result["finite"] for result in results} == {False}
    assert len({result["culprit"] for result in results}) == 1
    assert "gradient of model." in results[0]["culprit"]
