"""The model's cut, checked on the meta device, and what a token costs."""

from __future__ import annotations

import pytest
from tests.support.planned_runs import EMBEDDING, LAYER, run

from dilocox.errors import ModelError
from dilocox.tools.planner.model_outline import ModelOutline, check_cut


def test_parameters_and_compute_by_hand() -> None:
    outline = ModelOutline.of(run())
    assert outline.layer_parameters == LAYER
    assert outline.parameters == 4 * LAYER + 2 * EMBEDDING + 32
    assert outline.stage_parameters == [outline.parameters]
    # Per token: every matrix once, attention to half of 16 positions twice (scores and values).
    layer = LAYER - 2 * 32 + 16 * 32
    assert outline.compute == 4 * layer + EMBEDDING
    assert outline.flops_per_token == 6 * (4 * layer + EMBEDDING)
    assert outline.head_compute(outline.blueprint.cut[-1]) == EMBEDDING


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("stages", "chunks", "schedule"),
    [(1, 1, "1f1b"), (3, 1, "1f1b"), (2, 2, "zbv"), (2, 2, "interleaved-1f1b")],
)
def test_every_parameter_is_in_exactly_one_stage(
    tied: bool, stages: int, chunks: int, schedule: str
) -> None:
    config = run(
        model={"architecture": {**run().model.architecture, "tie_word_embeddings": tied}},
        site={"stages": stages, "chunks": chunks, "schedule": schedule},
    )
    outline = ModelOutline.of(config)
    assert sum(len(shapes) for shapes in outline.shapes) == len(outline.whole)
    assert len(outline.shapes) == stages
    held = sum(outline.stage_parameters)
    # The copy of a tied head in another chunk is held as well.
    split = tied and stages * chunks > 1
    assert held == outline.parameters + (EMBEDDING if split else 0)


def test_a_cut_that_loses_doubles_or_bends_a_parameter_is_found() -> None:
    whole = {"a": (2, 3), "b": (4,)}
    check_cut([{"a": (2, 3)}, {"b": (4,)}], whole)
    with pytest.raises(ModelError, match="a is in stage 0 and in stage 1"):
        check_cut([{"a": (2, 3)}, {"a": (2, 3), "b": (4,)}], whole)
    with pytest.raises(ModelError, match="b is in no stage"):
        check_cut([{"a": (2, 3)}], whole)
    with pytest.raises(ModelError, match=r"shape \[3, 2\] is not the model's \[2, 3\]"):
        check_cut([{"a": (3, 2), "b": (4,)}], whole)
    with pytest.raises(ModelError, match="not the model's at all"):
        check_cut([{"a": (2, 3), "b": (4,), "c": (1,)}], whole)
