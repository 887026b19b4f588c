"""Factors of the low-rank codec, quantised so that the sums of P Qᵀ are exact.

P Qᵀ has the same bits on every machine, in any order of its sums over the rank, for three reasons:

- P consists of 8-bit codes times powers of two, Q of 4- or 8-bit codes (`bits`) times bf16 scales.
  A product is a whole number below 2^(7 + bits - 1 + 8), times a power of two.
- A sum adds values of the same block of all columns of a factor. No block is more than 2^8 (P) or
  2^`spread` (Q) below the largest of these blocks: fainter blocks of P take a coarser step, fainter
  blocks of Q become zero. The loss is small against the error of the largest block, and error
  feedback keeps it. So all partial sums are whole multiples of one power of two, and less than 2^53
  times that power: they are exact in float64.
- Limits on both exponents keep every sum away from overflow and from subnormal numbers in fp32.

The decoder checks that a payload keeps these limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.compression.base import BLOCK, check_payload
from dilocox.compression.blockwise_int import Quantised
from dilocox.compression.lowrank.layout import BASIS_BLOCK_BYTES, Stack
from dilocox.errors import ExchangeError

_BASIS_SPREAD = 8
_BASIS_LARGEST = 127
_BASIS_HIGHEST, _BASIS_LOWEST = -6, -32
_HIGHEST, _LOWEST = 100, -80
_UNUSED = -127


def basis_bytes(length: int) -> int:
    """Return the size, in bytes, of a basis of `length` values: 129 bytes for 128 values."""
    return length // BLOCK * BASIS_BLOCK_BYTES


def spread(rank: int, bits: int) -> int:
    """Return by how many powers of two the scales of blocks of Q in one sum may differ.

    The result is the 53 bits of float64, less the bits of both codes, of Q's scale, of P's spread
    and of a sum over the rank. With 4-bit codes it is 24 at rank 8, and 16 at rank 2,048; with
    8-bit codes it is 4 less.
    """
    codes = _BASIS_LARGEST.bit_length() + bits - 1
    return 53 - codes - 8 - _BASIS_SPREAD - (rank - 1).bit_length()


def encode_factors(values: Tensor, stacks: Sequence[Stack], codec: Quantised) -> Tensor:
    """Encode finite fp32 [length] with `codec`. Blocks too faint for exact sums become zero.

    Raises `ExchangeError` if the values are too large: a scale of 2^101 or more.
    """
    payload = codec.encode(values)
    scales, codes = _parts(payload, values.numel(), codec)
    exponents = _exponents(scales)
    if bool((exponents > _HIGHEST).any()):
        raise ExchangeError(
            "a low-rank factor is beyond 2^100: this contribution is not exchanged; lower the "
            "inner learning rate"
        )
    for stack in stacks:
        some = stack.view_blocks(exponents)
        faint = some < _lowest(some, spread(stack.rank, codec.bits), _LOWEST)
        stack.view_blocks(codes).masked_fill_(faint.unsqueeze(-1), 0)
    return payload


def decode_factors(
    payload: Tensor, stacks: Sequence[Stack], length: int, codec: Quantised
) -> Tensor:
    """Decode a uint8 payload of `encode_factors` to fp32 [length].

    Raises `ExchangeError` for a wrong size, or if the sums of P Qᵀ would not be exact.
    """
    payload = check_payload(payload, codec.payload_bytes(length), "low-rank factor", length)
    values = codec.decode(payload, length)
    scales, codes = _parts(payload, length, codec)
    exponents = _exponents(scales)
    exponents = exponents.masked_fill_(~(codes != 0).any(1), _UNUSED)
    bad = (exponents > _HIGHEST).any()
    for stack in stacks:
        some = stack.view_blocks(exponents)
        lowest = _lowest(some, spread(stack.rank, codec.bits), _LOWEST)
        bad |= ((some < lowest) & (some != _UNUSED)).any()
    if bool(bad):
        raise ExchangeError(
            "low-rank payload refused: scales of a factor differ by more than sums can hold, or "
            "are beyond 2^100; run the same version at every site"
        )
    return values


def encode_basis(values: Tensor, stacks: Sequence[Stack]) -> Tensor:
    """Encode orthonormal columns, float64 [length], to uint8 [basis_bytes(length)].

    The payload holds one byte x per block, x from 0 to 26, then the int8 codes in ±127. A value is
    code times the step 2^(-6 - x). The error is at most half a step, which is at most 1/127 of the
    block's largest value, unless exact sums needed a coarser step.
    """
    blocks = values.view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    # largest / 127 = mantissa x 2^exponent with a mantissa below 1, so codes stay below 127.
    exponents = torch.frexp(largest / _BASIS_LARGEST).exponent
    exponents = exponents.masked_fill_(largest == 0, _BASIS_LOWEST)
    exponents = exponents.clamp_(_BASIS_LOWEST, _BASIS_HIGHEST)
    for stack in stacks:
        some = stack.view_blocks(exponents)
        some.copy_(torch.maximum(some, _lowest(some, _BASIS_SPREAD, _BASIS_LOWEST)))
    steps = _basis_steps(values.device)[_BASIS_HIGHEST - exponents]
    codes = (blocks / steps.unsqueeze(1)).round_().to(torch.int8)
    head = (_BASIS_HIGHEST - exponents).to(torch.uint8)
    return torch.cat([head, codes.view(torch.uint8).view(-1)])


def decode_basis(payload: Tensor, stacks: Sequence[Stack], length: int) -> Tensor:
    """Decode uint8 [basis_bytes(length)] to float64 [length]. The values are exact in fp32, too.

    Raises `ExchangeError` for a wrong size, or if the sums of P Qᵀ would not be exact.
    """
    payload = check_payload(payload, basis_bytes(length), "low-rank basis", length)
    head = payload[: length // BLOCK].to(torch.int32)
    codes = payload[length // BLOCK :].view(torch.int8).view(-1, BLOCK)
    bad = (head > _BASIS_HIGHEST - _BASIS_LOWEST).any()
    exponents = _BASIS_HIGHEST - head
    exponents = exponents.masked_fill_(~(codes != 0).any(1), _UNUSED)
    for stack in stacks:
        some = stack.view_blocks(exponents)
        lowest = _lowest(some, _BASIS_SPREAD, _BASIS_LOWEST)
        bad |= ((some < lowest) & (some != _UNUSED)).any()
    if bool(bad):
        raise ExchangeError(
            "low-rank basis refused: its steps differ by more than sums can hold; run the same "
            "version at every site"
        )
    steps = _basis_steps(payload.device)[head.to(torch.int64)]
    return codes.to(torch.float64).mul_(steps.unsqueeze(1)).view(-1)


def _parts(payload: Tensor, length: int, codec: Quantised) -> tuple[Tensor, Tensor]:
    """Return views of scales, bf16 [blocks], and codes, uint8 [blocks, bytes], of a payload."""
    blocks = length // BLOCK
    scales = payload[: 2 * blocks].view(torch.bfloat16)
    return scales, payload[2 * blocks :].view(blocks, BLOCK * codec.bits // 8)


def _exponents(scales: Tensor) -> Tensor:
    """Return e, int32, of each positive bf16 scale in [2^e, 2^(e+1))."""
    return (scales.view(torch.int16).to(torch.int32) >> 7) - 127


def _lowest(exponents: Tensor, width: int, floor: int) -> Tensor:
    """Return the lowest exponent that each block may have, [count, 1, blocks].

    The lowest exponent is `width` below the largest exponent of the same block in all columns, and
    at least `floor`. `exponents` are [count, rank, blocks].
    """
    return exponents.amax(1, keepdim=True).sub_(width).clamp_(min=floor)


def _basis_steps(device: torch.device) -> Tensor:
    steps = [math.ldexp(1.0, e) for e in range(_BASIS_HIGHEST, _BASIS_LOWEST - 1, -1)]
    return torch.tensor(steps, dtype=torch.float64, device=device)
