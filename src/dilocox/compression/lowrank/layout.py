"""Which tensors go low rank, and where their factors lie.

A matrix U (rows x columns) becomes P Qᵀ with P (rows x rank) and Q (columns x rank). The factors
of all matrices lie in two flat buffers, one for each side; a column of a factor is contiguous and
padded with zeros to whole blocks of 128. So each block belongs to one column of one matrix: columns
differ in size as the singular values do, neighbours within a column hardly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression.base import BLOCK
from dilocox.compression.blockwise_int import Quantised
from dilocox.compression.buffer_layout import Geometry

DENSE = Quantised("int4", 5, bits=4)
"""Codec of everything that does not go low rank."""
SMALLEST = 4096
"""Matrices of fewer values go dense."""
BATCH = 1 << 18
"""Values worked on at a time: as many small matrices, or as many rows of a large one."""
BASIS_BLOCK_BYTES = 1 + BLOCK
"""Bytes of 128 values of a basis: a step and 8-bit codes."""


@dataclass(frozen=True)
class Stack:
    """`count` factors of one size in a flat buffer, each of `rank` columns of `size` values."""

    start: int
    count: int
    rank: int
    size: int

    @property
    def blocks(self) -> int:
        """Blocks of one column."""
        return -(-self.size // BLOCK)

    @property
    def length(self) -> int:
        """Values of all of them in the buffer."""
        return self.count * self.rank * self.blocks * BLOCK

    def view(self, buffer: Tensor) -> Tensor:
        """The transposed factors, [count, rank, size], in a flat buffer, without the padding."""
        some = buffer[self.start : self.start + self.length]
        return some.view(self.count, self.rank, self.blocks * BLOCK)[:, :, : self.size]

    def view_blocks(self, of_blocks: Tensor) -> Tensor:
        """[count, rank, blocks, ...] of a tensor that has one entry for each block."""
        first = self.start // BLOCK
        some = of_blocks[first : first + self.length // BLOCK]
        return some.view(self.count, self.rank, self.blocks, *of_blocks.shape[1:])


@dataclass(frozen=True)
class Matrices:
    """All matrices of one shape that go low rank: they are worked on together."""

    rows: int
    columns: int
    offsets: tuple[int, ...]
    """Where each starts in the fragment's buffer."""
    left: Stack
    """P of each, in the buffer of left factors."""
    right: Stack
    """Q of each, in the buffer of right factors."""

    @property
    def size(self) -> int:
        """Values of one of them."""
        return self.rows * self.columns

    def batches(self) -> Iterator[tuple[int, int]]:
        """[first, last) of those to be worked on at a time."""
        step = max(1, BATCH // self.size)
        for first in range(0, len(self.offsets), step):
            yield first, min(first + step, len(self.offsets))

    def matrix(self, flat: Tensor, number: int) -> Tensor:
        """View [rows, columns] of matrix `number` in the fragment's buffer."""
        start = self.offsets[number]
        return flat[start : start + self.size].view(self.rows, self.columns)

    def stacked(self, flat: Tensor, first: int, last: int) -> Tensor:
        """[last - first, rows, columns]: a copy, or a view where it is one matrix."""
        if last - first == 1:
            return self.matrix(flat, first).unsqueeze(0)
        return torch.stack([self.matrix(flat, number) for number in range(first, last)])


@dataclass(frozen=True)
class Arrangement:
    """Which tensors go low rank and which dense, and where the factors lie."""

    groups: tuple[Matrices, ...]
    dense: tuple[tuple[int, int], ...]
    """Start in the fragment's buffer and number of values of each tensor that goes dense."""
    left_length: int
    right_length: int
    dense_length: int

    @classmethod
    def of(cls, geometry: Geometry, rank: int, codec: Quantised) -> Arrangement:
        """Tensors of a geometry, as first dimension x rest, with rank min(rank, rows, columns).

        Dense are 1-D tensors, those under 4,096 values, and those where `pays` says so.
        """
        shapes: dict[tuple[int, int], list[int]] = {}
        dense = []
        for number, (shape, offset) in enumerate(
            zip(geometry.shapes, geometry.offsets, strict=True)
        ):
            size = geometry.size(number)
            rows = shape[0] if shape else 1
            if len(shape) >= 2 and size >= SMALLEST and pays(rows, size // rows, rank, codec):
                shapes.setdefault((rows, size // rows), []).append(offset)
            elif size:
                dense.append((offset, size))
        groups = []
        left_length = right_length = 0
        for (rows, columns), offsets in shapes.items():
            count, least = len(offsets), min(rank, rows, columns)
            left = Stack(left_length, count, least, rows)
            right = Stack(right_length, count, least, columns)
            left_length += left.length
            right_length += right.length
            groups.append(Matrices(rows, columns, tuple(offsets), left, right))
        dense_length = sum(whole_blocks(size) for _, size in dense)
        return cls(tuple(groups), tuple(dense), left_length, right_length, dense_length)


def whole_blocks(size: int) -> int:
    """`size` values and the padding after them."""
    return -(-size // BLOCK) * BLOCK


def pays(rows: int, columns: int, rank: int, codec: Quantised) -> bool:
    """Whether a matrix goes low rank: if that sends at most three quarters of dense int4's bytes.

    Counted is what a site sends for each transfer at two sites: the payload, and every other time
    the left factor and the basis (with more sites, these two weigh less). Bytes alone decide that
    low rank is possible; whether it is good is the controller's question. Near equal bytes dense
    int4 loses far less.
    """
    least = min(rank, rows, columns)
    left, right = -(-rows // BLOCK), -(-columns // BLOCK)
    block = codec.payload_bytes(BLOCK)
    twice = least * (left * (block + BASIS_BLOCK_BYTES) + 2 * right * block)
    dense = DENSE.payload_bytes(whole_blocks(rows * columns))
    return 4 * twice <= 3 * 2 * dense
