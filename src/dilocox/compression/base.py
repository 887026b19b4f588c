"""What a codec is, and the checks that all codecs share.

A codec without state maps a flat fp32 tensor to a payload of bytes whose size depends on the number
of values alone. A payload is little-endian; hosts are (x86-64 and aarch64 both are).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from dilocox.errors import ConfigError, ExchangeError

BLOCK = 128
"""Values per block: every length that a codec sees is a multiple of it."""

_CPU_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 26
_ALIGNMENT = 4


class Codec(Protocol):
    """Encodes n fp32 values to `payload_bytes(n)` bytes; n is a multiple of `BLOCK`.

    Input must be finite: the caller checks once, with `first_non_finite`, because it alone can
    name the tensor. Encoding a non-finite value gives a payload of the right size whose content
    is unspecified. Bytes and decoded values do not depend on thread count, CPU or device: all
    arithmetic is elementwise IEEE without fused steps, on exact or correctly rounded operations,
    and what is added up is exact in every order. Decoded values are finite, whatever the payload.
    """

    @property
    def name(self) -> str:
        """Name in the run file."""
        ...

    @property
    def identifier(self) -> int:
        """Number in the frame header; never used again for another codec."""
        ...

    @property
    def numbers(self) -> tuple[int, int]:
        """What else the frame header says of the codec: top-k's values per chunk, top-1's per
        block, low rank's rank and bits, and zeros where the codec's identifier says all."""
        ...

    def payload_bytes(self, n: int) -> int:
        """Exact payload size of n values, in bytes."""
        ...

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """fp32 [n] to uint8 [payload_bytes(n)] on the same device, into `out` if given.

        Raises `ExchangeError` for values that are not flat contiguous fp32 in whole blocks.
        """
        ...

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """uint8 [payload_bytes(n)] to fp32 [n] on the same device, into `out` if given.

        Raises `ExchangeError` if the payload does not have the size of n values, or is none that
        encoding can make where that would show in the values (a scale that is not finite, say).
        """
        ...


LARGEST = 2.0**40
"""A contribution with a value beyond this counts as not finite: no model comes back from there, and
sums of squares of a low-rank codec would not hold it."""


def first_unusable(values: Tensor, largest: float = LARGEST) -> int | None:
    """Position of the first of `values` (any float dtype, flat) that is NaN or beyond `largest`,
    or None.

    One pass without temporaries where all is well: a NaN survives in both extremes and an
    infinity is one of them.
    """
    if values.numel() == 0:
        return None
    low, high = torch.aminmax(values)
    if bool(low >= -largest) and bool(high <= largest):
        return None
    return int((~(values.abs() <= largest)).to(torch.uint8).argmax())


def first_non_finite(values: Tensor) -> int | None:
    """Position of the first NaN or infinity in `values` (any float dtype, flat), or None."""
    return first_unusable(values, torch.finfo(values.dtype).max)


def all_zero(values: Tensor) -> bool:
    """No value (any float dtype) is anything else than 0; true of none at all.

    The extremes take a sixth of the time that `Tensor.any` takes on a CPU.
    """
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(low == 0) and bool(high == 0)


def refuse_non_finite(values: Tensor, name: str) -> None:
    """Raise `ExchangeError` unless all decoded `values` of codec `name` are finite."""
    _refuse(values, name, torch.finfo(values.dtype).max)


def refuse_unusable(values: Tensor, name: str) -> None:
    """Raise `ExchangeError` for decoded `values` of codec `name` beyond `LARGEST`: means of finite
    ones can be finite, and the anchor be none after some of them.

    Twice as much passes: codecs round.
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
    """Raise `ExchangeError` that names `what` and the position unless all of `values` is finite."""
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
    """Raise `ConfigError` for a codec's own number that it does not have."""
    if not least <= number <= largest:
        raise ConfigError(f"codec {codec!r}: {what} must be from {least} to {largest}")


def check_values(values: Tensor) -> int:
    """Number of values of a codec's input; raises `ExchangeError` unless flat, fp32 and whole."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ExchangeError(
            f"a codec takes a flat contiguous fp32 tensor, not {values.dtype} "
            f"{list(values.shape)}: pack it with a layout first"
        )
    return check_count(values.numel())


def check_payload(payload: Tensor, size: int, name: str, n: int) -> Tensor:
    """The payload, its start aligned; raises `ExchangeError` unless it is uint8 [size]."""
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
    """The largest of bf16 `scales` (0 without any): each from `smallest` to `largest`, or `zero`.

    Raises `ExchangeError` for any other. The limits are positive and exact in bf16. Bits are
    compared, as whole numbers: a NaN, an infinity or a negative number is outside like any other.
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
    """`out` after a check of shape, dtype, device and alignment, or a new tensor."""
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
    """Intervals that cover n values: small enough for a CPU's cache, large elsewhere."""
    step = _CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE
    for start in range(0, n, step):
        yield start, min(start + step, n)
