"""Rows of a rank's memory: everything once, and what lies where."""

from __future__ import annotations

from tests.support.planned_runs import device, run

from dilocox.inner.memory import GIB
from dilocox.tools.planner.activations import Kept
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.memory_footprint import Footprint, footprints
from dilocox.tools.planner.memory_parts import Part, parts, parts_text
from dilocox.tools.planner.model_outline import ModelOutline

EACH = Kept(layer=200_000, entry=90_000, selected=120_000, head=500_000, exact=True)


def of(shared: bool = False, **sections: object) -> Footprint:
    config = run(**sections)
    place = GpuPlacement(device(shared=shared), 8, 1)
    return footprints(config, ModelOutline.of(config), place, EACH)[-1]


def by_kind(rows: list[Part], where: str) -> tuple[int, int, int]:
    """Bytes of what lasts, of a step, and the most of what comes instead of a step."""
    lasting = step = instead = 0
    for row in rows:
        size = getattr(row, where)
        if row.name.startswith("step:"):
            step += size
        elif row.name.startswith("or:"):
            instead = max(instead, size)
        elif "outside" not in row.name:
            lasting += size
    return lasting, step, instead


def test_rows_add_up_to_what_a_gpu_needs() -> None:
    site = {"stages": 2, "shards": 2, "batch_size": 8, "micro_batch_size": 1}
    for sections in ({}, {"site": site}, {"outer": {"device": "model"}}):
        found = of(record={"states_every": 2, "keep": 20}, **sections)
        rows = parts(found, reserved=5)
        lasting, step, instead = by_kind(rows, "device")
        assert lasting + max(step, instead) == found.device, sections
        assert rows[-1] == Part("CUDA and NCCL, outside the total", 5)
        assert all(row.device or row.host for row in rows)
        assert sum(row.host for row in rows if not row.name.startswith("or:")) <= found.host


def test_rows_add_up_on_processors() -> None:
    found = of(
        shared=True,
        record={"states_every": 2, "keep": 20},
        site={"shards": 2, "micro_batch_size": 1},
    )
    rows = parts(found, reserved=5)
    lasting, step, instead = by_kind(rows, "device")
    assert lasting + max(step, instead) == found.device
    assert not any(row.host for row in rows)
    assert "CUDA" not in rows[-1].name


def test_rows_as_text() -> None:
    found = of()
    lines = parts_text("stage 0", found, reserved=GIB)
    assert lines[0].split() == ["GiB", "per", "rank", "of", "stage", "0", "GPU", "host"]
    assert lines[1].split() == ["weights", "0.00"]
    row = next(line for line in lines if line.startswith("pinned"))
    assert row.endswith("0.00")
    assert len({len(line) for line in lines if line.startswith(("outer", "pinned", "total"))}) == 1
    assert lines[-2].split()[:2] == ["total", "0.00"]
    assert lines[-1] == "the step and each 'or' come one after another: only the largest counts"
    (alone,) = [line for line in parts_text("stage 0", of(shared=True), 0) if "GiB" in line]
    assert alone.split()[-1] == "memory"
