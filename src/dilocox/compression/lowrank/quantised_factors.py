"""Factors of the low-rank codec, quantised so that the sums of P Qᵀ are exact.

Why P Qᵀ comes out the same everywhere, in whatever order its sums over the rank are made:

- P is 8-bit codes times powers of two, Q 4- or 8-bit codes (`bits`) times bf16 scales. A product
  is a whole number below 2^(7 + bits - 1 + 8) times a power of two.
- Of blocks that meet in a sum (the same block of all columns of a factor), none is more than
  2^8 (P) or 2^`spread` (Q) below the largest: P takes a coarser step there, Q becomes zero. It
  is too little to matter against the error of the largest, and error feedback keeps it. So all
  partial sums are whole multiples of one power of two, below 2^53 of it: exact in float64.
- Limits on both exponents keep every sum clear of overflow and of subnormal numbers in fp32.

The decoder checks what the encoder promises.
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
    """Size in bytes of a basis of `length` values: 129 for each 128."""
    return length // BLOCK * BASIS_BLOCK_BYTES


def spread(rank: int, bits: int) -> int:
    """By how many powers of two the scales of blocks of Q that meet in a sum may differ.

    53 bits of float64 less those of both codes, of Q's scale, of P's spread and of a sum over
    the rank: 24 at rank 8, 16 at rank 2,048 with 4-bit codes; 4 less with 8-bit codes.
    """
    codes = _BASIS_LARGEST.bit_length() + bits - 1
    return 53 - codes - 8 - _BASIS_SPREAD - (rank - 1).bit_length()


def encode_factors(values: Tensor, stacks: Sequence[Stack], codec: Quantised) -> Tensor:
    """fp32 [length] to the payload of `codec`, without the blocks that are too faint.

    Values are finite. Raises `ExchangeError` for those beyond 2^100.
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
    """uint8 payload to fp32 [length]. Raises `ExchangeError` where the sums would not be exact."""
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
    """Orthonormal columns, float64 [length], to uint8 [basis_bytes(length)].

    Payload: for each block one byte x, then the int8 codes in ±127; a value is code times
    2^(-6 - x), x in 0..26. The error is at most half of this step: at most 1/127 of the block's
    largest value, unless the step had to be coarser.
    """
    blocks = values.view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    # largest / 127 = mantissa x 2^exponent with a mantissa below 1: codes are below 127.
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
    """uint8 [basis_bytes(length)] to float64 [length]; its values are exact in fp32 as well.

    Raises `ExchangeError` for a wrong size, and where the sums would not be exact.
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
    """Views of scales, bf16 [blocks], and packed codes, uint8 [blocks, bytes], as `Quantised`'s."""
    blocks = length // BLOCK
    scales = payload[: 2 * blocks].view(torch.bfloat16)
    return scales, payload[2 * blocks :].view(blocks, BLOCK * codec.bits // 8)


def _exponents(scales: Tensor) -> Tensor:
    """int32 e of each positive scale in [2^e, 2^(e+1)), bf16 as they are."""
    return (scales.view(torch.int16).to(torch.int32) >> 7) - 127


def _lowest(exponents: Tensor, width: int, floor: int) -> Tensor:
    """[count, rank, blocks] to [count, 1, blocks]: the lowest exponent that may stand there."""
    return exponents.amax(1, keepdim=True).sub_(width).clamp_(min=floor)


def _basis_steps(device: torch.device) -> Tensor:
    steps = [math.ldexp(1.0, e) for e in range(_BASIS_HIGHEST, _BASIS_LOWEST - 1, -1)]
    return torch.tensor(steps, dtype=torch.float64, device=device)
