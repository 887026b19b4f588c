"""Geometries, matrices and bytes that the tests of the low-rank codec share.

Run as a script it prints the digests of `digests`, for a fresh interpreter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.compression.base import BLOCK
from dilocox.compression.blockwise_int import Quantised
from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.frame import payload_digest
from dilocox.compression.lowrank.codec import LowRank
from dilocox.compression.lowrank.layout import Arrangement, Stack
from dilocox.compression.lowrank.quantised_factors import decode_basis, decode_factors, spread

SHAPES = ((160, 300), (64, 96), (300,), (64, 96), (40, 50), (0, 7), (6, 40, 50), (64, 96), (2, 9))
"""Low rank: 160 x 300 and three of 64 x 96 (gaps after the first), 6 x 2000 at rank 1 alone."""
INT4, INT8 = Quantised("int4", 5, bits=4), Quantised("int8", 4, bits=8)


def geometry_of(*shapes: tuple[int, ...]) -> Geometry:
    sizes = [-(-math.prod(shape) // BLOCK) * BLOCK for shape in shapes]
    places = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return Geometry(shapes, tuple(places[:-1]), places[-1])


def views(geometry: Geometry, flat: Tensor) -> list[Tensor]:
    return [
        flat[start : start + math.prod(shape)].view(shape)
        for start, shape in zip(geometry.offsets, geometry.shapes, strict=True)
    ]


def draw(geometry: Geometry, seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(geometry.length, generator=generator) * size
    for start, end in geometry.gaps():
        flat[start:end] = 0
    return flat


def flat_of(matrix: Tensor) -> Tensor:
    flat = torch.zeros(-(-matrix.numel() // BLOCK) * BLOCK)
    flat[: matrix.numel()] = matrix.reshape(-1).float()
    return flat


def spectrum(rows: int, columns: int, values: Sequence[float], seed: int) -> Tensor:
    """float64 matrix with these singular values and seeded singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64)).Q
        for n in (rows, columns)
    )
    return left * torch.tensor(values, dtype=torch.float64) @ right.T


def exchange(
    low: LowRank, us: Sequence[Tensor], warm: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Basis, payloads and decoded contributions of the sites' u."""
    basis = low.orthonormalise([low.project(u, warm) for u in us])
    payloads = [low.encode(u, basis) for u in us]
    return basis, payloads, [low.decode(payload, basis) for payload in payloads]


def factors(low: LowRank, payload: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """P [rows, rank] and Q [columns, rank], float64, of a codec for a single matrix."""
    kept = Quantised("int4", 5, bits=4) if low.bits == 4 else INT8
    (group,) = Arrangement.of(low.geometry, low.rank, kept).groups
    left = decode_basis(basis, [group.left], group.left.length)
    start = 40
    sent = payload[start : start + kept.payload_bytes(group.right.length)]
    right = decode_factors(sent, [group.right], group.right.length, kept)
    return group.left.view(left)[0].T, group.right.view(right)[0].double().T


def crafted(geometry: Geometry, rank: int, bits: int, seed: int) -> tuple[Tensor, Tensor]:
    """Basis and payload with any codes, and steps and scales in all of their range."""
    generator = torch.Generator().manual_seed(seed)
    low, kept = LowRank(geometry, rank, bits), INT4 if bits == 4 else INT8
    arranged = Arrangement.of(geometry, rank, kept)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    def exponents(stacks: list[Stack], lowest: int, highest: int, width: list[int]) -> Tensor:
        found = []
        for stack, some in zip(stacks, width, strict=True):
            floor = whole(lowest, highest - some + 1, stack.count, 1, stack.blocks)
            above = whole(0, some + 1, stack.count, stack.rank, stack.blocks)
            found.append((floor + above).view(-1))
        return torch.cat(found)

    lefts = [group.left for group in arranged.groups]
    rights = [group.right for group in arranged.groups]
    steps = exponents(lefts, -32, -6, [8] * len(lefts))
    codes = whole(-128, 128, arranged.left_length)
    basis = torch.cat([(-6 - steps).to(torch.uint8), codes.to(torch.int8).view(torch.uint8)])
    widths = [spread(stack.rank, bits) for stack in rights]
    scales = (exponents(rights, -80, 100, widths) + 127 << 7) + whole(
        0, 128, arranged.right_length // BLOCK
    )
    payload = torch.cat(
        [
            torch.frombuffer(bytearray(payload_digest(basis)), dtype=torch.uint8),
            torch.arange(low.matrices, dtype=torch.float64).view(torch.uint8),
            scales.to(torch.int16).view(torch.uint8),
            whole(0, 256, arranged.right_length * bits // 8).to(torch.uint8),
            INT4.encode(draw(geometry_of((arranged.dense_length,)), seed)),
        ]
    )
    return basis, payload


def digests() -> dict[int, str]:
    """Digest of what is decoded and of the next warm start, from crafted bytes, by bits."""
    found = {}
    for bits in (4, 8):
        geometry = geometry_of(*SHAPES, (700, 900))
        low = LowRank(geometry, 13, bits)
        basis, payload = crafted(geometry, 13, bits, 1)
        other = crafted(geometry, 13, bits, 2)[1]
        other[:32] = payload[:32]
        total = hashlib.sha256(low.decode(payload, basis).numpy().data)
        for count in (7, 8):
            warm = low.next_warm([payload, other], [1.25, 0.7], basis, low.first_warm(), count)
            total.update(warm.numpy().data)
        found[bits] = total.hexdigest()
    return found


def views_of_warm(low: LowRank, warm: Tensor) -> list[Tensor]:
    """[count, rank, columns] of each group, without the padding."""
    kept = INT4 if low.bits == 4 else INT8
    return [group.right.view(warm) for group in Arrangement.of(low.geometry, low.rank, kept).groups]


if __name__ == "__main__":
    for bits, digest in digests().items():
        print(bits, digest)
