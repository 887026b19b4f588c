"""Geometry: what lies where, and what is refused."""

from __future__ import annotations

import pytest

from dilocox.compression.buffer_layout import Geometry
from dilocox.errors import ExchangeError


def test_gaps_are_what_belongs_to_no_tensor() -> None:
    geometry = Geometry(((2, 100), (0, 7), (128,), (), (3,)), (128, 384, 384, 512, 640), 1024)
    assert [geometry.size(number) for number in range(5)] == [200, 0, 128, 1, 3]
    assert geometry.gaps() == [(0, 128), (328, 384), (513, 640), (643, 1024)]
    assert Geometry.flat(256).gaps() == []
    assert Geometry((), (), 128).gaps() == [(0, 128)]
    assert Geometry((), (), 0).gaps() == []


def test_equal_geometries_are_one_key() -> None:
    first, second = Geometry(((4, 8),), (0,), 128), Geometry(((4, 8),), (0,), 128)
    assert len({first, second}) == 1
    assert len({first, Geometry(((8, 4),), (0,), 128)}) == 2


@pytest.mark.parametrize(
    ("shapes", "offsets", "length", "reason"),
    [
        (((4,),), (0, 128), 256, "one offset per shape"),
        (((4,),), (64,), 128, "multiples of 128"),
        (((4,),), (0,), 100, "multiples of 128"),
        (((-4,),), (0,), 128, "negative"),
        (((4,),), (-128,), 128, "negative"),
        (((129,), (4,)), (0, 128), 256, r"tensor 0 of shape \[129\] at 0 does not end before 128"),
        (((4,), (4,)), (128, 0), 256, "tensor 0 .* does not end before 0"),
        (((2, 65),), (0,), 128, "does not end before 128"),
    ],
)
def test_impossible_geometries_are_refused(
    shapes: tuple[tuple[int, ...], ...], offsets: tuple[int, ...], length: int, reason: str
) -> None:
    with pytest.raises(ExchangeError, match=reason):
        Geometry(shapes, offsets, length)
