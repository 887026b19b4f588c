"""What is exchanged, to the byte, and what that costs by hand."""

from __future__ import annotations

import pytest
import torch
from tests.support.planned_runs import FREE, KINDS, run

from dilocox.compression import LowRank, compressor, frame_bytes, pack_frame
from dilocox.outer.layout import Layout, split_pieces
from dilocox.tools.planner.hardware_table import Host
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.payload_costs import (
    PayloadCost,
    joined,
    parcels,
    ring_seconds,
    round_trips,
    toil,
)
from dilocox.training.payload_sizes import factor_bytes


@pytest.mark.parametrize(
    "codec", ["none", "fp16", "int8", "int4+moments", "int2", "topk:64+moments", "cocktail"]
)
def test_payloads_are_what_codecs_really_make(codec: str) -> None:
    config = run(site={"stages": 2})
    outline = ModelOutline.of(config)
    found = parcels(config, outline.shapes, codec)
    assert [len(row) for row in found] == [4, 4]
    for row, shapes in zip(found, outline.shapes, strict=True):
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        for parcel, names in zip(row, split_pieces(sizes, 4), strict=True):
            layout = Layout.of({name: shapes[name] for name in names})
            made = compressor(codec, layout.geometry)
            part = made.part(0, layout.length, 0)
            frame = pack_frame(part, part.encode(torch.randn(layout.length)))
            assert parcel.payload == parcel.own == frame.numel()
            assert parcel.values == layout.length
            assert parcel.products == 0


def test_shards_send_their_own_parts() -> None:
    config = run(site={"shards": 2})
    shapes = ModelOutline.of(config).shapes
    (row,) = parcels(config, shapes, "int8")
    (whole,) = parcels(run(), shapes, "int8")
    for parcel, one in zip(row, whole, strict=True):
        assert parcel.own < parcel.payload <= 2 * parcel.own
        assert one.payload <= parcel.payload <= one.payload + 4 * 1024
        assert parcel.values < one.values


def test_pieces_that_travel_together() -> None:
    pieces = [
        PayloadCost(200, 10, 110, 3),
        PayloadCost(300, 20, 160, 4),
        PayloadCost(400, 30, 210, 5),
    ]
    assert joined(pieces, 2) == PayloadCost(900 - 2 * 2 * 64, 60, 480 - 2 * 64, 12)
    assert joined(pieces[:1], 2) == pieces[0]
    factors = [PayloadCost(200, 10, 110, 3, 150), PayloadCost(300, 20, 160, 4, 170)]
    assert joined(factors, 2).ahead == 150 + 170 - 2 * 64


def test_low_rank_by_hand() -> None:
    config = run()
    outline = ModelOutline.of(config)
    found = parcels(config, outline.shapes, "lowrank:2")
    # The large matrices of 32 x 64 = 2,048 values are below 4,096: all dense, nothing to multiply.
    assert sum(parcel.products for parcel in found[0]) == 2 * 128 * 32 * 2
    made = compressor("lowrank:2", Layout.of(outline.shapes[0]).geometry)
    assert isinstance(made, LowRank)
    assert sum(each.payload for each in found[0]) >= frame_bytes(made.payload_part)
    assert factor_bytes("lowrank:2", made.geometry) == frame_bytes(made.factor_part)
    assert factor_bytes("int4", made.geometry) == 0
    assert all(parcel.ahead > 0 for parcel in found[0])
    assert {parcel.ahead for parcel in parcels(config, outline.shapes, "int4")[0]} == {0}


def test_methods_that_exchange_gradients_have_one_fragment() -> None:
    config = run(outer={"method": "allreduce"})
    ((parcel,),) = parcels(config, ModelOutline.of(config).shapes, "none")
    assert parcel.payload == 4 * parcel.values + 64


def host(**values: float) -> Host:
    rates = {
        "encode": dict.fromkeys(KINDS, values.pop("encode", 1e18)),
        "decode": dict.fromkeys(KINDS, values.pop("decode", 1e18)),
    }
    return Host(**{**vars(FREE), **rates, **values})  # type: ignore[arg-type]


def test_work_of_an_exchange_by_hand() -> None:
    parcel = PayloadCost(payload=4000, values=1000, own=500, products=0)
    own = host(encode=1e3, decode=2e3, average=4e3, digest=1e3, outer=0.01, exchange_cpu=0.25,
               exchange_thread=0.125)  # fmt: skip
    found = toil(parcel, "int4", own, 3, "gather")
    assert found.begin == found.land == 5.0
    assert found.encode == pytest.approx(4000 / 1e3 + 0.5)
    # Three payloads are decoded, checked and added up.
    assert found.decode == pytest.approx(3 * (2 + 0.5 + 1))
    assert found.work == pytest.approx(4.5 + 10.5 + 0.125)
    assert found.processor == pytest.approx(4.5 + 10.5 + 0.25)
    recorded = toil(parcel, "int4", own, 3, "gather", commits=True)
    # All values are hashed, in fp32.
    assert recorded.encode == pytest.approx(found.encode + 4.0)
    assert recorded.work == pytest.approx(found.work + 4.0)
    parts = toil(parcel, "int4", own, 4, "reduce")
    assert parts.encode == pytest.approx(4.5)
    # Every site's part of a chunk, then all of the mean; the mean's chunk is encoded again.
    assert parts.decode == pytest.approx(2 * 2 + 4 / 4 + 2 * 0.5 + 1)


def test_low_rank_work_by_hand() -> None:
    parcel = PayloadCost(payload=4000, values=1000, own=500, products=6000)
    own = host(lowrank=1e3)
    found = toil(parcel, "lowrank:4", own, 2, "gather")
    assert found.encode == pytest.approx(12.0)
    assert found.decode == pytest.approx(2 * 6.0)


def test_a_ring_by_hand() -> None:
    # 434 GB of gradients at two sites of 1 Gbit/s: each sends them once.
    assert ring_seconds(434e9, 2, 125e6) == pytest.approx(3472)
    assert ring_seconds(1e9, 4, 1e9) == pytest.approx(1.5)
    assert ring_seconds(1e9, 1, 1e9) == 0.0


def test_messages_of_an_exchange() -> None:
    assert round_trips("int4", "gather") == 2
    assert round_trips("int4", "reduce") == 4
    assert round_trips("lowrank:8", "gather") == 6
