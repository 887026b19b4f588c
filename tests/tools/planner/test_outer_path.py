"""What boundaries, landings and codecs cost beside a GPU: counted on tensors, and by hand."""

from __future__ import annotations

import pytest
import torch
from tests.support.planned_runs import FREE, TABLE, device, run
from tests.support.tracking import Tracker

from dilocox.compression import Geometry, compressor
from dilocox.outer.averaging import average
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout
from dilocox.outer.outer_step import Rule
from dilocox.tools.planner.outer_path import AVERAGE_BYTES, OUTER_BYTES, outer_path
from dilocox.tools.planner.payload_costs import PayloadCost, toil
from dilocox.utils import cache_blocks

VALUES = 1 << 18


def test_a_boundary_and_a_landing_move_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_blocks, "PER_THREAD", 1 << 40)  # as on a GPU: few launches
    live = {"w": torch.ones(VALUES // 1024, 1024)}
    state = FragmentState(Layout.of({"w": live["w"].shape}), live, error_feedback=True)
    rule = Rule(overlap="keep", learning_rate=0.5, momentum=0.5, residual=0.5)
    with Tracker() as tracker:
        u, _ = state.boundary(live, 1.0, 1.0)
        state.committed(u, u)
        state.land(live, u, rule)
    assert tracker.moved / VALUES == pytest.approx(OUTER_BYTES, rel=1e-3)


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "int8", "int4", "int2"])
def test_codecs_move_what_the_table_says(spec: str) -> None:
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    made = compressor(spec, Geometry(((VALUES // 1024, 1024),), (0,), VALUES))
    part, gpu = made.part(0, VALUES, seed=1), TABLE.device("h100-80g")
    with Tracker() as encoding:
        payload = part.encode(values)
    with Tracker() as decoding:
        part.decode(payload)
    assert encoding.moved / VALUES == pytest.approx(gpu.encode_bytes[spec], rel=0.1)
    assert decoding.moved / VALUES == pytest.approx(gpu.decode_bytes[spec], rel=0.1)


def test_an_average_moves_what_is_said() -> None:
    values = torch.ones(VALUES)
    with Tracker() as tracker:
        average(iter([values, values]), [1.0, 1.0])
    assert tracker.moved / VALUES / 2 == pytest.approx(AVERAGE_BYTES, rel=1e-3)


def test_values_cross_pcie_where_the_outer_state_is_in_the_hosts_memory() -> None:
    gpu = device(pcie_rate=100.0, memory_rate=1024.0)
    parcel = PayloadCost(payload=50, values=100, own=50, products=0)
    found = toil(parcel, "int4", outer_path(run(), gpu), 3, "gather")
    # 4 bytes of each of 100 values down; down again, and up.
    assert (found.begin, found.land) == pytest.approx((4.0, 8.0))
    assert max(found.encode, found.decode) < 1e-9
    # Gradients go down, and their mean comes up.
    gradients = outer_path(run(outer={"method": "allreduce"}), gpu)
    found = toil(parcel, "none", gradients, 3, "gather")
    assert (found.begin, found.land) == pytest.approx((4.0, 4.0))


def test_payloads_alone_cross_where_it_is_on_the_gpu() -> None:
    gpu = device(
        pcie_rate=100.0,
        memory_rate=1024.0,
        encode_bytes={"int4": 20.48},
        decode_bytes={"int4": 10.24},
    )
    path = outer_path(run(outer={"device": "model"}), gpu)
    parcel = PayloadCost(payload=50, values=100, own=50, products=0)
    found = toil(parcel, "int4", path, 3, "gather")
    outer, encode, decode = 100 * 256 / 1024 / 2, 100 * 20.48 / 1024, 100 * 10.24 / 1024
    # The GPU cannot train while it computes for an exchange.
    assert found.begin == pytest.approx(outer + encode)
    assert found.land == pytest.approx(outer + 3 * (decode + 100 * AVERAGE_BYTES / 1024))
    # Half a second of PCIe for each payload.
    assert found.encode == pytest.approx(0.5)
    assert found.decode == pytest.approx(1.5)
    assert found.work == pytest.approx(2.0)
    # What the record commits to is hashed by a processor, all values of it.
    host = {**vars(FREE), "digest": 100.0}
    slow = outer_path(run(outer={"device": "model"}), device(host=type(FREE)(**host)))
    assert toil(parcel, "int4", slow, 3, "gather", commits=True).encode == pytest.approx(4.5)
    reduced = toil(parcel, "int4", path, 4, "reduce")
    assert reduced.encode == pytest.approx(0.5)
    assert reduced.decode == pytest.approx(1.5)


def test_codecs_that_are_not_known_of_a_gpu_are_as_slow_as_on_its_host() -> None:
    path = outer_path(run(outer={"device": "model"}), device())
    assert path.encode == FREE.encode
    assert path.lowrank == 1e11 / 2


def test_processors_train_and_exchange_without_copies() -> None:
    assert outer_path(run(outer={"device": "model"}), device(shared=True)) is FREE
