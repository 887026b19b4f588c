"""bf16 computation over fp32 parameters, compiled layers, and real models."""

from __future__ import annotations

import numpy as np
import pytest

from dilocox.errors import ConfigError
from tests.support import site_cases, toy_model
from tests.support.worker_pool import Pool

pytestmark = pytest.mark.waits


LAYOUTS = [
    (1, 1, "1f1b"), (2, 1, "1f1b"), (2, 1, "zbv"), (1, 2, "1f1b"), (2, 2, "1f1b"), (2, 2, "zbv")
]  # fmt: skip
ALTERNATING = [number % 2 == 1 for number in range(len(LAYOUTS))]
"""Checkpointing by layout: with and without it occur with each number of stages and of shards, and
with each schedule."""


@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    [
        *zip(LAYOUTS, ALTERNATING, strict=True),
        *(
            pytest.param(layout, not other, marks=pytest.mark.slow)
            for layout, other in zip(LAYOUTS, ALTERNATING, strict=True)
        ),
    ],
)
def test_bf16_gradients_are_near_fp32(
    pool: Pool, layout: tuple[int, int, str], checkpointing: bool
) -> None:
    stages, shards, schedule = layout
    results = pool.run(
        stages * shards,
        "tests.support.site_cases",
        "half_precision",
        checkpointing=checkpointing,
        tied=True,
        stages=stages,
        shards=shards,
        schedule=schedule,
    )
    for result in results:
        assert result["fp32"]
        # Not zero either: bf16 was really used.
        assert 1e-6 < result["error"] < 0.05
        assert result["losses"][1] == pytest.approx(result["losses"][0], rel=0.01)
        assert result["losses"] == results[0]["losses"]


def test_split_backward_sums_micro_batches_in_fp32(pool: Pool) -> None:
    """Under FSDP with bf16 parameters, 4 micro-batches add up as they do without the split. One sum
    of two in bf16 would be 100 times as far away as what is allowed."""
    found = [
        pool.run(
            4,
            "tests.support.site_cases",
            "half_precision",
            micros=4,
            stages=2,
            shards=2,
            schedule=schedule,
        )
        for schedule in ("interleaved-1f1b", "interleaved-zero-bubble")
    ]
    for whole, split in zip(*found, strict=True):
        for name, gradient in whole["gradients"].items():
            np.testing.assert_allclose(split["gradients"][name], gradient, rtol=1e-5, atol=1e-7)


def test_whole_gradients_are_summed_in_fp32(pool: Pool) -> None:
    """4 micro-batches of bf16 gradients add up as they do when each is reduced."""
    found = [
        pool.run(
            2,
            "tests.support.site_cases",
            "half_precision",
            micros=4,
            shards=2,
            whole_gradients=whole,
        )
        for whole in (False, True)
    ]
    for each, once in zip(*found, strict=True):
        assert once["fp32"]
        for name, gradient in each["gradients"].items():
            np.testing.assert_allclose(once["gradients"][name], gradient, rtol=1e-5, atol=1e-7)


def test_tied_qwen3_of_the_models_room(pool: Pool) -> None:
    single = pool.run(
        1, "tests.support.site_model_cases", "real_model", stages=1, shards=1, schedule="1f1b"
    )[0]
    assert "model.embed_tokens.weight" in single["names"]
    assert "lm_head.weight" not in single["names"]
    for stages, shards, schedule in [(2, 2, "1f1b"), (2, 1, "zbv"), (4, 1, "1f1b")]:
        results = pool.run(
            stages * shards,
            "tests.support.site_model_cases",
            "real_model",
            stages=stages,
            shards=shards,
            schedule=schedule,
        )
        names = {name for result in results for name in result["names"]}
        assert names == set(single["names"])
        for result in results:
            assert result["values"] == pytest.approx(single["values"], rel=1e-4)
            assert result["values"] == results[0]["values"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_train_alike(pool: Pool, backend: str) -> None:
    losses = pool.run(1, "tests.support.site_model_cases", "compiled", backend=backend)[0]
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-4)


def test_rows_that_are_no_micro_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="not divisible into micro-batches of 2"):
        site_cases.build(rows=4, micro=2).inner_step(*toy_model.batch(3, seed=0), 0.1)
