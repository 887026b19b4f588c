"""Choice of the tensors that are sent as low rank, and places of their factors in two buffers.

A matrix U (rows x columns) becomes P Qᵀ with P (rows x rank) and Q (columns x rank). Two flat
buffers hold the left and the right factors of all matrices. A column of a factor is contiguous and
padded with zeros to whole blocks of 128. So each block belongs to one column of one matrix. This
suits blockwise quantisation: magnitudes differ between columns as the singular values do, but
hardly within a column.
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
"""Codec of the tensors that are not sent as low rank."""
SMALLEST = 4096
"""Matrices with fewer values are sent dense."""
BATCH = 1 << 18
"""Values that are processed at a time: several small matrices, or some rows of a large matrix."""
BASIS_BLOCK_BYTES = 1 + BLOCK
"""Bytes of 128 values of a basis: one step and 128 8-bit codes."""


@dataclass(frozen=True)
class Stack:
    """`count` factors of one size in a flat buffer, each of `rank` columns of `size` values."""

    start: int
    count: int
    rank: int
    size: int

    @property
    def blocks(self) -> int:
        """Number of blocks of one column."""
        return -(-self.size // BLOCK)

    @property
    def length(self) -> int:
        """Number of values of the whole stack in the buffer, padding included."""
        return self.count * self.rank * self.blocks * BLOCK

    def view(self, buffer: Tensor) -> Tensor:
        """Return a view of the transposed factors, [count, rank, size], in a flat buffer.

        The view leaves the padding out.
        """
        some = buffer[self.start : self.start + self.length]
        return some.view(self.count, self.rank, self.blocks * BLOCK)[:, :, : self.size]

    def view_blocks(self, of_blocks: Tensor) -> Tensor:
        """Return a view [count, rank, blocks, ...] of a tensor with one entry per block."""
        first = self.start // BLOCK
        some = of_blocks[first : first + self.length // BLOCK]
        return some.view(self.count, self.rank, self.blocks, *of_blocks.shape[1:])


@dataclass(frozen=True)
class Matrices:
    """All low-rank matrices of one shape. They are processed together."""

    rows: int
    columns: int
    offsets: tuple[int, ...]
    """Start of each matrix in the fragment's buffer."""
    left: Stack
    """P of each matrix, in the buffer of left factors."""
    right: Stack
    """Q of each matrix, in the buffer of right factors."""

    @property
    def size(self) -> int:
        """Number of values of one matrix."""
        return self.rows * self.columns

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield [first, last) of the matrices that are processed at a time."""
        step = max(1, BATCH // self.size)
        for first in range(0, len(self.offsets), step):
            yield first, min(first + step, len(self.offsets))

    def matrix(self, flat: Tensor, number: int) -> Tensor:
        """Return a view [rows, columns] of matrix `number` in the fragment's buffer."""
        start = self.offsets[number]
        return flat[start : start + self.size].view(self.rows, self.columns)

    def stacked(self, flat: Tensor, first: int, last: int) -> Tensor:
        """Return matrices [first, last) as [last - first, rows, columns].

        The result is a view of `flat` for a single matrix, else a copy.
        """
        if last - first == 1:
            return self.matrix(flat, first).unsqueeze(0)
        return torch.stack([self.matrix(flat, number) for number in range(first, last)])


@dataclass(frozen=True)
class Arrangement:
    """The low-rank matrices, the dense tensors, and the places of the factors."""

    groups: tuple[Matrices, ...]
    dense: tuple[tuple[int, int], ...]
    """(start in the fragment's buffer, number of values) of each tensor that is sent dense."""
    left_length: int
    right_length: int
    dense_length: int

    @classmethod
    def of(cls, geometry: Geometry, rank: int, codec: Quantised) -> Arrangement:
        """Return the arrangement of the tensors of `geometry`, with rank min(rank, rows, columns).

        A tensor counts as a matrix of its first dimension x all others. Three kinds of tensors are
        sent dense: 1-D tensors, tensors with fewer than 4,096 values, and tensors for which `pays`
        is False.
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
    """Return `size` rounded up to whole blocks of 128 values."""
    return -(-size // BLOCK) * BLOCK


def pays(rows: int, columns: int, rank: int, codec: Quantised) -> bool:
    """Return True if low rank sends at most three quarters of the bytes of dense int4.

    The comparison counts the bytes that a site sends per exchange in a run of two sites: the
    payload, and in every second exchange the left factor and the basis. With more sites, factor and
    basis matter less. The limit is below one because dense int4 loses far less at equal bytes. The
    result only says that low rank is worthwhile in bytes; the controller decides whether to use it.
    """
    least = min(rank, rows, columns)
    left, right = -(-rows // BLOCK), -(-columns // BLOCK)
    block = codec.payload_bytes(BLOCK)
    twice = least * (left * (block + BASIS_BLOCK_BYTES) + 2 * right * block)
    dense = DENSE.payload_bytes(whole_blocks(rows * columns))
    return 4 * twice <= 3 * 2 * dense
