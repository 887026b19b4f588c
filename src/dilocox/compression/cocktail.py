"""Random tenth, then the largest fifth of it, as 4-bit integers (CocktailSGD's form).

Of every ten neighbours one is looked at, drawn from the seed alike at every site, so that nothing
need be sent about it. Of every 4,096 values looked at (the last chunk may be shorter: c), the
k = ceil(820 * c / 4096) largest are sent: one bf16 scale, then, as `dilocox.compression.sparse`
says, the indices among the c and signed codes of 4 bits in ±7. Payload of n values: the sum over
chunks of the ceil(n / 10) values looked at of 2 + ceil((k * (5 + l) + (c >> l)) / 8) bytes, with
the l >= 0 that makes them least; 848 bytes for c = 4,096, 0.166 bits per value.

The draw is the same everywhere because it is arithmetic modulo 2^64 on whole numbers (SplitMix64
of seed, place and group number; high 32 bits times ten, divided by 2^32): no floating point, no
library's generator whose stream might change with its version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilocox.compression import sparse
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
    """Works in host memory: tensors of another device are copied there and back."""

    seed: int
    """The same at all sites, another one for every exchange."""
    place: int
    """Where in the buffer the values begin: equal tensors do not lose the same positions."""
    name: str = "cocktail"
    identifier: int = 8
    numbers: tuple[int, int] = (0, 0)

    def payload_bytes(self, n: int) -> int:
        """As the module says."""
        looked_at = -(-check_count(n) // _GROUP)
        return sparse.payload_bytes(looked_at, _KEPT, _HEAD, _BITS)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        n = check_values(values)
        payload = output(out, self.payload_bytes(n), torch.uint8, values.device)
        host = payload if payload.device.type == "cpu" else torch.empty_like(payload, device="cpu")
        given, records, done = values.cpu().numpy(), host.numpy(), 0
        for start, rows, width in sparse.chunks(-(-n // _GROUP), _KEPT):
            size = rows * sparse.record_bytes(width, _KEPT, _HEAD, _BITS)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            some = given[self.positions(start, start + rows * width, n)].reshape(rows, width)
            k = sparse.kept_of(width, _KEPT)
            found = sparse.strongest(some.view(np.int32) & np.int32(0x7FFFFFFF), k)
            chosen = torch.from_numpy(some.reshape(-1)[found]).view(rows, k)
            scale = chosen.abs().amax(1, keepdim=True).mul_(1.0 / _LARGEST_CODE)
            scale = scale.to(torch.bfloat16).clamp_(min=_SMALLEST_SCALE)
            code = chosen.mul_(scale.to(torch.float32).reciprocal_()).round_().to(torch.int64)
            record[:, :_HEAD] = scale.view(torch.uint8).numpy()
            where = sparse.indices_of(found, rows, width)
            record[:, _HEAD:] = sparse.pack(where, code.numpy(), width, _BITS)
        return payload if payload is host else payload.copy_(host)

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`. Refuses indices that encoding does not make, too."""
        payload = check_payload(payload, self.payload_bytes(n), self.name, n)
        values = output(out, n, torch.float32, payload.device)
        host = values if values.device.type == "cpu" else torch.empty_like(values, device="cpu")
        made, records, done = host.zero_().numpy(), payload.cpu().numpy(), 0
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
        return values if values is host else values.copy_(host)

    def positions(self, start: int, end: int, n: int) -> Array:
        """Which of n values groups [start, end) look at: int64 [end - start], one per group."""
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


def _mixed(number: int) -> int:
    """SplitMix64's output for a state, with Python's whole numbers."""
    number = (number + _STEP) & _MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)
