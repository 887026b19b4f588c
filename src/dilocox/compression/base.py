"""The codec protocol, and checks that all codecs share.

A codec has no state. It maps a flat fp32 tensor to a payload of bytes; the size of the payload
depends on the number of values alone. Payloads are little-endian, and codecs need a little-endian
host, such as x86-64 or aarch64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from dilocox.errors import ConfigError, ExchangeError

BLOCK = 128
"""Values per block. Every length that a codec gets is a multiple of `BLOCK`."""

_CPU_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 26
_ALIGNMENT = 4


class Codec(Protocol):
    """Encodes n fp32 values to `payload_bytes(n)` bytes; n is a multiple of `BLOCK`.

    Input must be finite. The caller checks this once, with `first_non_finite`, because only the
    caller can name the tensor. Encoding a non-finite value gives a payload of the right size with
    unspecified content.

    Bytes and decoded values do not depend on thread count, CPU or device. All arithmetic is
    elementwise IEEE without fused operations, and each operation is exact or correctly rounded.
    Sums are exact in every order. Decoded values are finite for every payload.
    """

    @property
    def name(self) -> str:
        """Name in the run file."""
        ...

    @property
    def identifier(self) -> int:
        """Number in the frame header. A number is never reused for another codec."""
        ...

    @property
    def numbers(self) -> tuple[int, int]:
        """Parameters of the codec in the frame header. top-k: values kept per 4,096, and 0; top-1:
        values per block, and 0; low rank: rank and bits; other codecs: zeros."""
        ...

    def payload_bytes(self, n: int) -> int:
        """Exact payload size of n values, in bytes."""
        ...

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode fp32 [n] to uint8 [payload_bytes(n)] on the same device, into `out` if given.

        Raises `ExchangeError` if the values are not flat contiguous fp32 in whole blocks.
        """
        ...

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """Decode uint8 [payload_bytes(n)] to fp32 [n] on the same device, into `out` if given.

        Raises `ExchangeError` if the payload does not have the size of n values. Also raises it for
        content that no encoder writes and that changes the result, such as an infinite scale.
        """
        ...


LARGEST = 2.0**40
"""Largest magnitude of a value of a contribution; a contribution beyond it counts as not finite. No
model recovers from such a value, and sums of squares of the low-rank codec could overflow."""


def first_unusable(values: Tensor, largest: float = LARGEST) -> int | None:
    """Return the position of the first of `values` that is NaN or beyond `largest`, or None.

    `values` are flat, of any float dtype. If all values are usable, one pass without temporary
    tensors suffices: minimum and maximum are NaN if a value is NaN.
    """
    if values.numel() == 0:
        return None
    low, high = torch.aminmax(values)
    if bool(low >= -largest) and bool(high <= largest):
        return None
    return int((~(values.abs() <= largest)).to(torch.uint8).argmax())


def first_non_finite(values: Tensor) -> int | None:
    """Return the position of the first NaN or infinity in flat `values`; None if all are finite."""
    return first_unusable(values, torch.finfo(values.dtype).max)


def all_zero(values: Tensor) -> bool:
    """Return True if all `values` (any float dtype) are 0, or if there are no values.

    Minimum and maximum take a sixth of the time that `Tensor.any` takes on a CPU.
    """
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(low == 0) and bool(high == 0)


def refuse_non_finite(values: Tensor, name: str) -> None:
    """Raise `ExchangeError` unless all decoded `values` of codec `name` are finite."""
    _refuse(values, name, torch.finfo(values.dtype).max)


def refuse_unusable(values: Tensor, name: str) -> None:
    """Raise `ExchangeError` if a decoded value of codec `name` is NaN or beyond 2 · `LARGEST`.

    Finite values are not enough: the mean of huge values can be finite, and the anchor can still
    overflow after some rounds. The factor of 2 leaves room for the rounding of codecs.
    """
    _refuse(values, name, 2 * LARGEST)


def _refuse(values: Tensor, name: str, largest: float) -> None:
    position = first_unusable(values, largest)
    if position is not None:
        raise ExchangeError(
            f"{name} payload refused: value {position} is {float(values[position]):.3g}; no site's "
            "encoder writes that"
        )


def require_finite(values: Tensor, what: str) -> None:
    """Raise `ExchangeError`, with `what` and the position, unless all `values` are finite."""
    position = first_non_finite(values)
    if position is not None:
        raise ExchangeError(
            f"{what}: value {position} of {values.numel()} is {float(values[position])}; a "
            "non-finite contribution is not exchanged: go on from the anchor"
        )


def check_count(n: int) -> int:
    """Return n if it is a possible number of values, else raise `ExchangeError`."""
    if n < 0 or n % BLOCK:
        raise ExchangeError(f"{n} values are not whole blocks of {BLOCK}: pad the layout")
    return n


def check_number(codec: str, what: str, number: int, least: int, largest: int) -> None:
    """Raise `ConfigError` unless `number`, the parameter `what` of a codec, is in its limits."""
    if not least <= number <= largest:
        raise ConfigError(f"codec {codec!r}: {what} must be from {least} to {largest}")


def check_values(values: Tensor) -> int:
    """Return the number of values of a codec's input.

    Raises `ExchangeError` unless the input is flat contiguous fp32 in whole blocks.
    """
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ExchangeError(
            f"a codec takes a flat contiguous fp32 tensor, not {values.dtype} "
            f"{list(values.shape)}: pack it with a layout first"
        )
    return check_count(values.numel())


def check_payload(payload: Tensor, size: int, name: str, n: int) -> Tensor:
    """Return the payload, copied if its start is not aligned.

    Raises `ExchangeError` unless the payload is uint8 [size].
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != size:
        raise ExchangeError(
            f"{name} payload of {n} values must be {size} bytes, got {list(payload.shape)} of "
            f"{payload.dtype}: sender and receiver disagree about the plan"
        )
    aligned = payload.is_contiguous() and payload.storage_offset() % _ALIGNMENT == 0
    return payload if aligned else payload.clone(memory_format=torch.contiguous_format)


def check_scales(
    scales: Tensor, smallest: float, largest: float, name: str, zero: bool = False
) -> float:
    """Check bf16 `scales` and return the largest one; 0 if there are none.

    Raises `ExchangeError` if a scale is outside [`smallest`, `largest`]. With `zero`, a scale of 0
    is accepted too. The limits are positive and exact in bf16. The bits are compared as whole
    numbers, so NaN, infinities and negative numbers are outside the limits.
    """
    bits = scales.view(torch.int16).reshape(-1)
    if zero:
        bits = bits[bits != 0]
    if bits.numel() == 0:
        return 0.0
    found = torch.aminmax(bits)
    limits = torch.tensor([smallest, largest], dtype=torch.bfloat16).view(torch.int16)
    if int(found.min) < int(limits[0]) or int(found.max) > int(limits[1]):
        raise ExchangeError(
            f"{name} payload refused: it has a scale that is not finite or not from {smallest:.3g} "
            f"to {largest:.3g}; no site's encoder writes that"
        )
    return float(found.max.view(torch.bfloat16))


def output(out: Tensor | None, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `out` after a check of shape, dtype, device and alignment; a new tensor if None.

    Raises `ExchangeError` if `out` does not fit.
    """
    if out is None:
        return torch.empty(size, dtype=dtype, device=device)
    if out.dtype != dtype or out.shape != (size,) or not out.is_contiguous():
        raise ExchangeError(f"output must be flat contiguous {dtype} [{size}]")
    if out.device != device:
        raise ExchangeError(f"output is on {out.device}, input on {device}: copy explicitly")
    if out.storage_offset() * out.itemsize % _ALIGNMENT:
        raise ExchangeError(f"output must start at a multiple of {_ALIGNMENT} bytes in its storage")
    return out


def pieces(n: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield intervals [start, end) that cover n values: on a CPU they fit its cache, on other
    devices they are large."""
    step = _CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE
    for start in range(0, n, step):
        yield start, min(start + step, n)
