"""The time of an inner step: by hand, and against the orders that PyTorch's schedules follow."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.support.planned_runs import EMBEDDING, LAYER, device, run
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from dilocox.config.run_config import RunConfig
from dilocox.inner import chunks_of_stage, stage_of_chunk
from dilocox.tools.planner import step_time as timing
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.memory_footprint import in_flight
from dilocox.tools.planner.model_outline import ModelOutline

MATRICES = LAYER - 2 * 32 + 16 * 32
"""Multiply-adds per token of a layer."""


def pipeline(
    schedule: str, stages: int, chunks: int, micro_batches: int, **model: Any
) -> RunConfig:
    return run(
        model=model,
        site={
            "stages": stages,
            "chunks": chunks,
            "schedule": schedule,
            "micro_batch_size": 1,
            "batch_size": micro_batches,
        },
    )


def test_one_gpu_by_hand() -> None:
    # 8 sequences of 16 tokens, 1 TFLOP/s: 6 operations per multiply-add and token.
    outline = ModelOutline.of(run())
    found = timing.step_time(run(), outline, GpuPlacement(device(), 1, 1), 1e10)
    operations = 6 * (4 * MATRICES + EMBEDDING) * 8 * 16
    assert found.compute == pytest.approx(operations / 1e12)
    assert found.bubble == found.traffic == 0.0
    assert found.optimizer == pytest.approx(28 * outline.parameters / 1e12)
    again = run(model={"activation_checkpointing": True})
    found = timing.step_time(again, outline, GpuPlacement(device(), 1, 1), 1e10)
    more = 2 * 4 * MATRICES * 8 * 16
    assert found.compute == pytest.approx((operations + more) / 1e12)
    # Processors: reading and writing is shared by the cores, operations are those of all of them.
    muon, one, eight = (
        run(inner={"optimizer": "muon"}),
        *(GpuPlacement(device(shared=True, cores=cores), 1, 1) for cores in (1.0, 8.0)),
    )
    took = [
        timing.optimizer_seconds(muon, outline, place, place.device.rate(bf16=True))
        for place in (one, eight)
    ]
    assert took[0] == pytest.approx(8 * took[1])
    slower = timing.step_time(
        run(site={"precision": "fp32"}), outline, GpuPlacement(device(utilisation=0.5), 1, 1), 1e10
    )
    assert slower.compute == pytest.approx(operations / 5e10)


def test_a_pipeline_fills_once_by_hand() -> None:
    config = pipeline("1f1b", 4, 1, 8)
    outline = ModelOutline.of(config)
    found = timing.step_time(config, outline, GpuPlacement(device(), 4, 1), 1e10)
    middle = 6 * MATRICES * 16 / 1e12
    last = 6 * (MATRICES + EMBEDDING) * 16 / 1e12
    assert found.compute == pytest.approx(8 * last)
    # The others pass the first micro-batch on, and take the last one back.
    assert found.bubble == pytest.approx(3 * middle)
    # bf16 hidden states of 16 tokens, from stage to stage, both ways, on every one's way.
    hop = 16 * 32 * 2 / 1e10
    assert found.traffic == pytest.approx(2 * hop * (4 + 7))
    across = timing.step_time(config, outline, GpuPlacement(device(), 2, 2), 1e6)
    assert across.traffic == pytest.approx(found.traffic * 1e10 / 1e6)


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("parts", [{}, {"shards": 2}, {"replicas": 2}])
def test_hidden_states_have_the_compute_dtype(
    precision: str, width: int, parts: dict[str, int]
) -> None:
    config = run(
        site={"stages": 2, "batch_size": 8, "micro_batch_size": 1, "precision": precision, **parts}
    )
    place = GpuPlacement(device(), 4, 1)
    found = timing.hop_seconds(config, ModelOutline.of(config), place, 1e10, 16)
    assert found == pytest.approx(16 * 32 * width / 1e10)


def test_fsdp_traffic_by_hand() -> None:
    place = GpuPlacement(device(), 4, 1)
    for stages, sync, gathers, times in (
        (2, "auto", 1, 1), (1, "micro-batch", 2, 4), (1, "step", 1, 1), (1, "auto", 1, 1),
    ):  # fmt: skip
        config = run(
            site={"stages": stages, "shards": 2, "batch_size": 8, "micro_batch_size": 1,
                  "gradient_sync": sync}
        )  # fmt: skip
        outline = ModelOutline.of(config)
        size = max(outline.stage_parameters) / 2 * (2 * gathers + 4)
        found = timing.fsdp_seconds(config, outline, place, 1e9)
        assert found == pytest.approx(times * size / 1e10)
        # Shards of one stage on two nodes: through the node's network.
        apart = timing.fsdp_seconds(config, outline, GpuPlacement(device(), 1, 4), 1e9)
        assert apart == pytest.approx(times * size / 1e9)


def test_cores_that_all_ranks_share_have_no_bubbles() -> None:
    config = pipeline("1f1b", 4, 1, 8)
    outline = ModelOutline.of(config)
    alone = timing.step_time(
        config, outline, GpuPlacement(device(shared=True, cores=0.5), 1, 1), 1e10
    )
    assert alone.compute == pytest.approx(outline.flops_per_token * 8 * 16 / 0.5e12)
    assert alone.bubble == alone.traffic == 0.0
    assert alone.optimizer == pytest.approx(28 * sum(outline.stage_parameters) / 0.5e12)


def test_muons_products_by_hand() -> None:
    shapes = {
        "model.layers.0.w": (32, 64),
        "model.layers.0.norm": (32,),
        "model.embed_tokens.weight": (128, 32),
    }
    # Five iterations of three products: 32 x 64 x 32, 32 x 32 x 32, 32 x 32 x 64.
    expected = 5 * 2 * (32 * 64 * 32 + 32 * 32 * 32 + 32 * 32 * 64)
    assert timing.orthonormalising_flops(shapes) == expected


def test_the_compute_limit_counts_all_gpus_of_all_sites() -> None:
    outline = ModelOutline.of(run())
    places = [GpuPlacement(device(utilisation=0.5), 8, 2), GpuPlacement(device(), 4, 1)]
    expected = (16 * 0.5e12 + 4 * 1e12) / outline.flops_per_token
    assert timing.compute_limit(run(), outline, places) == pytest.approx(expected)
    older = [GpuPlacement(device(multiplies_bf16=False), 4, 1)]
    auto = run(site={"precision": "auto"})
    limit = timing.compute_limit(auto, outline, older)
    assert limit == pytest.approx(4 * 1e11 / outline.flops_per_token)
    assert timing.compute_limit(run(), outline, older) == pytest.approx(10 * limit)


# --- PyTorch's own orders of work --------------------------------------------------------------

Action = tuple[str, int, int]
"""(kind, chunk, micro-batch)."""


def orders(schedule: str, stages: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """What every rank does, in its order: F, B (both halves), I and W (its halves)."""
    if schedule in ("gpipe", "1f1b"):
        return [plain_order(schedule, stage, stages, micro_batches) for stage in range(stages)]
    kind: Any = {
        "interleaved-1f1b": ScheduleInterleaved1F1B,
        "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
        "zbv": ScheduleZBVZeroBubble,
    }[schedule]
    mine = []
    for number in chunks_of_stage(schedule, stages, chunks, 0):
        stage = MagicMock(spec=_PipelineStageBase)
        stage.stage_index, stage.group_size, stage.num_stages = number, stages, stages * chunks
        stage.group_rank, stage.is_first, stage.is_last = 0, number == 0, False
        stage.group, stage.has_backward, stage.submod = MagicMock(), True, MagicMock()
        mine.append(stage)
    made = kind(mine, micro_batches, loss_fn=lambda *_: None)
    names = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found = []
    for rank in range(stages):
        row = []
        for action in made.pipeline_order[rank]:
            each = [] if action is None else (action.sub_actions or [action])
            row += [
                (names[one.computation_type.name], one.stage_index, one.microbatch_index)
                for one in each
                if one.computation_type.name in names
            ]
        found.append(row)
    return found


def plain_order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    if schedule == "gpipe":
        forward = [("F", stage, m) for m in range(micro_batches)]
        return forward + [("B", stage, m) for m in range(micro_batches)]
    warm = min(micro_batches, stages - stage)
    row = [("F", stage, m) for m in range(warm)]
    for m in range(micro_batches):
        row.append(("B", stage, m))
        if warm + m < micro_batches:
            row.append(("F", stage, warm + m))
    return row


def play(
    schedule: str, stages: int, chunks: int, rows: list[list[Action]], seconds: dict[str, float]
) -> float:
    """When the last rank is through, if each works as soon as what it needs is there."""
    total = stages * chunks
    done: dict[Action, float] = {}
    free, position = [0.0] * stages, [0] * stages
    while any(position[rank] < len(rows[rank]) for rank in range(stages)):
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                kind, chunk, m = row[position[rank]]
                needs: list[Action] = []
                if kind == "F" and chunk > 0:
                    needs = [("F", chunk - 1, m)]
                elif kind in ("B", "I"):
                    needs = [("F", chunk, m)]
                    if chunk < total - 1:
                        needs.append(("back", chunk + 1, m))
                elif kind == "W":
                    needs = [("back", chunk, m)]
                if any(need not in done for need in needs):
                    break
                begin = max([free[rank], *(done[need] for need in needs)])
                free[rank] = begin + seconds[kind]
                done[(kind, chunk, m)] = free[rank]
                if kind in ("B", "I"):
                    done[("back", chunk, m)] = free[rank]
                position[rank] += 1
                moved = True
        assert moved, "the order waits for itself"
    return max(free)


CASES = [
    ("gpipe", 4, 1, 8),
    ("1f1b", 4, 1, 8),
    ("1f1b", 4, 1, 5),
    ("interleaved-1f1b", 4, 2, 8),
    ("interleaved-1f1b", 2, 3, 8),
    ("interleaved-zero-bubble", 4, 2, 8),
    ("interleaved-zero-bubble", 2, 2, 8),
    ("zbv", 4, 2, 8),
    ("zbv", 2, 2, 12),
]


def layers_for(chunks: int) -> dict[str, Any]:
    return {"architecture": {**run().model.architecture, "num_hidden_layers": chunks}}  # type: ignore[dict-item]


@pytest.mark.parametrize(("schedule", "stages", "chunks", "count"), CASES)
def test_the_formulas_agree_with_the_schedules_that_run(
    schedule: str, stages: int, chunks: int, count: int
) -> None:
    config = pipeline(schedule, stages, chunks, count, **layers_for(stages * chunks))
    total = stages * chunks
    found = timing.makespan(config, [1.0] * total, [2.0] * total)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    played = play(schedule, stages, chunks, orders(schedule, stages, chunks, count), seconds)
    assert played >= count * 3 * chunks
    assert found == pytest.approx(played, rel=0.06)


@pytest.mark.parametrize(("schedule", "stages", "chunks", "count"), CASES)
def test_micro_batches_in_flight_are_those_of_the_schedules(
    schedule: str, stages: int, chunks: int, count: int
) -> None:
    config = pipeline(schedule, stages, chunks, count, **layers_for(stages * chunks))
    for stage, row in enumerate(orders(schedule, stages, chunks, count)):
        held = most = 0
        for kind, chunk, _ in row:
            assert stage_of_chunk(schedule, stages, chunks, chunk) == stage
            # The weights' half of a backward pass keeps what it needs.
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
            most = max(most, held)
        assert in_flight(config, stage) == most
