"""Places of tensors in the flat fp32 buffer that a codec gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from dilocox.compression.base import BLOCK
from dilocox.errors import ExchangeError


@dataclass(frozen=True)
class Geometry:
    """Shapes and places of tensors in a flat buffer. Hashable, and equal at every site.

    Tensors lie in order and do not overlap. Each tensor starts at a multiple of 128 values. The
    gaps between tensors are zero before encoding and after decoding. A tensor may have no elements.
    Raises `ExchangeError` if shapes, offsets and length break these rules.
    """

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    length: int
    """Values in the buffer; a multiple of 128."""

    def __post_init__(self) -> None:
        places = (*self.offsets, self.length)
        if len(self.shapes) != len(self.offsets) or any(place % BLOCK for place in places):
            raise ExchangeError(
                f"a geometry needs one offset per shape, offsets and length multiples of {BLOCK}; "
                f"got {len(self.shapes)} shapes, offsets {list(self.offsets)}, length {self.length}"
            )
        if any(size < 0 for shape in self.shapes for size in shape) or places[0] < 0:
            raise ExchangeError("a geometry has a negative size or offset")
        for number, (start, after) in enumerate(pairwise(places)):
            if start + self.size(number) > after:
                raise ExchangeError(
                    f"tensor {number} of shape {list(self.shapes[number])} at {start} does not end "
                    f"before {after}"
                )

    @classmethod
    def flat(cls, length: int) -> Geometry:
        """Return the geometry of one 1-D tensor that fills a buffer of `length` values."""
        return cls(((length,),), (0,), length)

    def size(self, number: int) -> int:
        """Return the number of elements of tensor `number`."""
        return math.prod(self.shapes[number])

    def gaps(self) -> list[tuple[int, int]]:
        """Return [start, end) of each interval that belongs to no tensor, in order."""
        ends = [0, *(start + self.size(i) for i, start in enumerate(self.offsets))]
        starts = (*self.offsets, self.length)
        return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
