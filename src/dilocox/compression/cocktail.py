"""A random tenth of the values, then the largest fifth of these, as 4-bit integers (CocktailSGD).

One of every ten neighbours is drawn at random. All sites draw the same values from the common seed,
so the draw is not sent. The drawn values are divided into chunks of c = 4,096; the last chunk may
be shorter. Of each chunk the k = ceil(820 * c / 4096) largest values are sent. A chunk has one bf16
scale, the indices among the c values, and signed 4-bit codes in ±7, packed as in
`dilocox.compression.sparse`.

A chunk takes 2 + ceil((k * (5 + l) + (c >> l)) / 8) bytes, with the l >= 0 for which this is least.
For c = 4,096 these are 848 bytes, or 0.166 bits per value of the tensor. A payload of n values
holds the chunks of the ceil(n / 10) drawn values.

The draw has the same result on every machine, because it is arithmetic modulo 2^64 on whole
numbers: SplitMix64 of seed, place and group number, then the high 32 bits times ten, divided by
2^32. The draw uses neither floating point nor a library's generator, whose stream could change with
the version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilocox.compression import sparse, tensor_ops, tensor_sparse
from dilocox.compression.base import (
    check_count,
    check_payload,
    check_scales,
    check_values,
    output,
)
from dilocox.compression.sparse import Array
from dilocox.errors import ExchangeError

_GROUP = 10
_KEPT = 820
_HEAD = 2
_BITS = 4
_LARGEST_CODE = 7
_SMALLEST_SCALE = 2.0**-125
_LARGEST_SCALE = float(torch.tensor(torch.finfo(torch.float32).max / 7).to(torch.bfloat16))
_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Cocktail:
    """Codec `cocktail`. It works on the device of its tensors, with the same bytes everywhere."""

    seed: int
    """Seed of the draw: equal at all sites, different in every exchange."""
    place: int
    """Position in the buffer at which the values begin. It enters the draw, so that different parts
    of the buffer do not lose the same positions."""
    name: str = "cocktail"
    identifier: int = 8
    numbers: tuple[int, int] = (0, 0)

    def payload_bytes(self, n: int) -> int:
        """Return the size that the module's docstring gives."""
        looked_at = -(-check_count(n) // _GROUP)
        return sparse.payload_bytes(looked_at, _KEPT, _HEAD, _BITS)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        n = check_values(values)
        payload = output(out, self.payload_bytes(n), torch.uint8, values.device)
        if not tensor_ops.numpy_reaches(values):
            return self._encode_there(values, payload)
        given, records, done = values.numpy(), payload.numpy(), 0
        for start, rows, width in sparse.chunks(-(-n // _GROUP), _KEPT):
            size = rows * sparse.record_bytes(width, _KEPT, _HEAD, _BITS)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            some = given[self.positions(start, start + rows * width, n)].reshape(rows, width)
            k = sparse.kept_of(width, _KEPT)
            found = sparse.strongest(some.view(np.int32) & np.int32(0x7FFFFFFF), k)
            chosen = torch.from_numpy(some.reshape(-1)[found]).view(rows, k)
            scale, code = _to_codes(chosen)
            record[:, :_HEAD] = scale.view(torch.uint8).numpy()
            where = sparse.indices_of(found, rows, width)
            record[:, _HEAD:] = sparse.pack(where, code.numpy(), width, _BITS)
        return payload

    def _encode_there(self, values: Tensor, payload: Tensor) -> Tensor:
        """`encode` in tensor operations."""
        n, done = values.numel(), 0
        for start, rows, width in sparse.chunks(-(-n // _GROUP), _KEPT, tensor_ops.PIECE):
            size = rows * sparse.record_bytes(width, _KEPT, _HEAD, _BITS)
            record = payload[done : done + size].view(rows, -1)
            done += size
            picked = self._positions_there(start, start + rows * width, n, values.device)
            some = values[picked].view(rows, width)
            magnitudes = some.view(torch.int32) & 0x7FFFFFFF
            where = tensor_sparse.strongest(magnitudes, sparse.kept_of(width, _KEPT))
            scale, code = _to_codes(some.gather(1, where))
            record[:, :_HEAD] = scale.view(torch.uint8)
            record[:, _HEAD:] = tensor_sparse.pack(where, code, width, _BITS)
        return payload

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`. Also refuses indices that no encoder writes."""
        payload = check_payload(payload, self.payload_bytes(n), self.name, n)
        values = output(out, n, torch.float32, payload.device).zero_()
        if not tensor_ops.numpy_reaches(payload):
            return self._decode_there(payload, values)
        made, records, done = values.numpy(), payload.numpy(), 0
        for start, rows, width in sparse.chunks(-(-n // _GROUP), _KEPT):
            size = rows * sparse.record_bytes(width, _KEPT, _HEAD, _BITS)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            scale = torch.from_numpy(record[:, :_HEAD].copy()).view(torch.bfloat16)
            check_scales(scale, _SMALLEST_SCALE, _LARGEST_SCALE, self.name)
            k = sparse.kept_of(width, _KEPT)
            where, code = sparse.unpack(record[:, _HEAD:], k, width, _BITS, self.name)
            code = (code ^ 8) - 8
            if (code < -_LARGEST_CODE).any():
                raise ExchangeError(f"{self.name} payload refused: it has the code -8")
            picked = self.positions(start, start + rows * width, n)
            made[picked[sparse.places_of(where, width)]] = (
                code.astype(np.float32) * scale.to(torch.float32).numpy()
            )
        return values

    def _decode_there(self, payload: Tensor, values: Tensor) -> Tensor:
        """`decode` in tensor operations; `values` are zeros."""
        n, done, refusals = values.numel(), 0, tensor_ops.Refusals(self.name)
        for start, rows, width in sparse.chunks(-(-n // _GROUP), _KEPT, tensor_ops.PIECE):
            size = rows * sparse.record_bytes(width, _KEPT, _HEAD, _BITS)
            record = payload[done : done + size].view(rows, -1)
            done += size
            head = record[:, :_HEAD].clone(memory_format=torch.contiguous_format)
            scale = head.view(torch.bfloat16)
            refusals.add(
                tensor_ops.bad_scales(scale, _SMALLEST_SCALE, _LARGEST_SCALE) | (scale == 0),
                tensor_ops.scale_reason(_SMALLEST_SCALE, _LARGEST_SCALE),
            )
            k = sparse.kept_of(width, _KEPT)
            where, code = tensor_sparse.unpack(record[:, _HEAD:], k, width, _BITS, refusals)
            code = (code ^ 8) - 8
            refusals.add(code < -_LARGEST_CODE, "it has the code -8")
            picked = self._positions_there(start, start + rows * width, n, values.device)
            places = picked.view(rows, width).gather(1, where)
            sent = code.to(torch.float32) * scale.to(torch.float32)
            values.scatter_(0, places.view(-1), sent.view(-1))
        refusals.settle()
        return values

    def positions(self, start: int, end: int, n: int) -> Array:
        """Return the drawn positions of groups [start, end) among n values: int64, one per group.

        A group is ten neighbours; the last group may be shorter.
        """
        key = _mixed(_mixed(self.seed & _MASK) ^ self.place)
        number = np.arange(start, end, dtype=np.uint64)
        mixed = number * np.uint64(_STEP) + np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        high = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)
        size = np.minimum(np.uint64(n) - number * np.uint64(_GROUP), np.uint64(_GROUP))
        picked: Array = (number * np.uint64(_GROUP) + (high * size >> np.uint64(32))).astype(
            np.int64
        )
        return picked

    def _positions_there(self, start: int, end: int, n: int, there: torch.device) -> Tensor:
        """`positions` on another device. Signed whole numbers wrap as unsigned numbers do."""
        key = _mixed(_mixed(self.seed & _MASK) ^ self.place)
        number = torch.arange(start, end, dtype=torch.int64, device=there)
        mixed = number * _signed(_STEP) + _signed(key)
        mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
        high = _shifted(mixed ^ _shifted(mixed, 31), 32)
        size = (n - number * _GROUP).clamp_(max=_GROUP)
        return number * _GROUP + (high * size >> 32)


def _to_codes(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return bf16 scales [rows, 1] and int64 codes [rows, k] of fp32 `chosen` [rows, k].

    `chosen` is overwritten.
    """
    scale = chosen.abs().amax(1, keepdim=True).mul_(1.0 / _LARGEST_CODE)
    scale = scale.to(torch.bfloat16).clamp_(min=_SMALLEST_SCALE)
    return scale, chosen.mul_(scale.to(torch.float32).reciprocal_()).round_().to(torch.int64)


def _signed(number: int) -> int:
    """Return the signed whole number with the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """Shift the bits of int64 numbers right, and fill with zeros."""
    return numbers >> places & ((1 << 64 - places) - 1)


def _mixed(number: int) -> int:
    """Return SplitMix64's output for the state `number`, in Python's whole numbers."""
    number = (number + _STEP) & _MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def build_cocktail(_: int, seed: int, place: int) -> Cocktail:
    """`cocktail`: it alone draws from the seed."""
    return Cocktail(seed, place)
