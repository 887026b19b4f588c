"""A site that trains adapters: only these have state, whatever the layout of the site."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.worker_pool import Pool

pytestmark = pytest.mark.waits

CASE = ("tests.support.adapter_cases", "train")
LAYOUTS = [
    {"stages": 1, "shards": 2, "whole_gradients": True},
    {"stages": 2, "shards": 1, "checkpointing": "selective"},
    {"stages": 2, "shards": 2, "checkpointing": True},
    {"stages": 2, "shards": 1, "schedule": "zbv"},
    {"stages": 2, "shards": 2, "schedule": "interleaved-zero-bubble"},
]
MORE = [
    {"stages": 1, "shards": 2},
    {"stages": 2, "shards": 1, "schedule": "interleaved-1f1b"},
]
"""Those whose parts occur in `LAYOUTS`."""


def named(layout: dict[str, object]) -> str:
    return "-".join(str(value) for value in layout.values())


def slow(layouts: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.slow) for each in layouts]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, object]:
    """One rank that holds all."""
    (found,) = pool.run(1, *CASE, stages=1, shards=1)
    return found


@pytest.fixture(scope="module")
def packed(pool: Pool) -> dict[str, dict[str, Any]]:
    """One rank that holds all, with its base in four bits, by precision."""
    pytest.importorskip("bitsandbytes")
    how = {"stages": 1, "shards": 1, "base": "nf4"}
    return {name: pool.run(1, *CASE, **how, precision=name)[0] for name in ("float32", "bfloat16")}


def test_only_adapters_are_trained(alone: dict[str, object]) -> None:
    assert alone["kept"]
    assert not alone["graded"]
    assert alone["optimized"] == alone["names"]
    values = alone["values"]
    assert isinstance(values, list)
    losses = values[::3]
    assert len(set(losses)) == 2


@pytest.mark.parametrize("layout", [*LAYOUTS, *slow(MORE)], ids=named)
def test_every_layout_trains_the_same(
    pool: Pool, alone: dict[str, object], layout: dict[str, object]
) -> None:
    ranks = int(str(layout["stages"])) * int(str(layout["shards"]))
    found = pool.run(ranks, *CASE, **layout)
    for each in found:
        assert each["kept"]
        assert not each["graded"]
        np.testing.assert_allclose(each["values"], alone["values"], rtol=2e-5)
    assert sorted({name for each in found for name in each["names"]}) == alone["names"]


@pytest.mark.parametrize(
    ("precision", "shards"),
    [
        ("float32", 1),
        ("bfloat16", 2),
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, marks=pytest.mark.slow),
    ],
)
def test_a_frozen_a_has_no_state(pool: Pool, shards: int, precision: str) -> None:
    for each in pool.run(
        shards, *CASE, stages=1, shards=shards, precision=precision, freeze_a=True
    ):
        assert each["kept"]
        assert not each["graded"]
        assert each["optimized"] == each["names"]
        assert all(".lora_B." in name for name in each["names"])
        assert each["dtypes"] == {f"torch.{precision}"}
        assert len(set(each["values"][::3])) == 2


@pytest.mark.parametrize(
    "layout",
    [
        {"stages": 1},
        {"stages": 2, "schedule": "zbv", "precision": "bfloat16"},
        {"stages": 1, "shards": 2, "whole_gradients": True, "precision": "bfloat16"},
        {"stages": 1, "replicas": 2},
        {"stages": 2, "shards": 2, "checkpointing": True},
        *slow(
            [
                {"stages": 2, "checkpointing": "selective"},
                {"stages": 2, "schedule": "interleaved-1f1b", "checkpointing": True},
                {"stages": 1, "shards": 2},
            ]
        ),
    ],
    ids=named,
)
def test_a_base_in_four_bits_trains_the_same_however_it_is_cut(
    pool: Pool,
    alone: dict[str, object],
    packed: dict[str, dict[str, Any]],
    layout: dict[str, Any],
) -> None:
    precision = layout.get("precision", "float32")
    whole = packed[precision]
    assert whole["names"] == alone["names"]
    layout = {"shards": 1, **layout}
    firsts = layout["stages"] * layout["shards"]
    ranks = firsts * layout.get("replicas", 1)
    for each in pool.run(ranks, *CASE, **layout, base="nf4")[:firsts]:
        assert each["kept"]
        assert not each["graded"]
        tolerance = 2e-5 if precision == "float32" else 2e-2
        np.testing.assert_allclose(each["values"], whole["values"], rtol=tolerance)
    assert not np.allclose(whole["values"], alone["values"], rtol=1e-4)


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_in_bf16_the_base_has_no_fp32_form(pool: Pool, shards: int) -> None:
    for each in pool.run(shards, *CASE, stages=1, shards=shards, precision="bfloat16"):
        assert each["dtypes"] == {"torch.bfloat16"}
        assert each["live"] == {"torch.float32"}
        assert each["kept"]


def test_dropout_hangs_on_the_seed(pool: Pool, alone: dict[str, object]) -> None:
    one, two = (pool.run(1, *CASE, stages=1, shards=1, dropout=0.3)[0] for _ in range(2))
    assert one["values"] == two["values"]
    assert one["values"] != alone["values"]
