"""The K largest of every 4,096 values, with 12-bit indices and 2-bit values (SparseLoCo's form).

Payload: one record per chunk of 4,096 values and one for a shorter last chunk. A record of a chunk
of c values, k = ceil(K * c / 4096), has 4 + ceil(14 * k / 8) bytes: two bf16 levels, then per kept
value 14 bits: 2 of value (1: negative, 2: the second level) and 12 of index above them. K = 64 is
116 bytes per 4,096 values, 0.227 bits per value.

The levels are the mean magnitudes of the small and of the large kept values, divided where Lloyd's
iteration for least squared error comes to after a few steps from their mean. Magnitudes enter sums
as whole numbers up to 2^30 (of the chunk's largest): exact in float64 in every order, so payloads
do not depend on the machine. Levels are 0 or normal fp32 numbers.
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

_HEAD = 4
_VALUE_BITS = 2
_ENTRY_BITS = sparse.INDEX_BITS + _VALUE_BITS
_STEPS = 3
_WHOLE = 2.0**30
_LARGEST_LEVEL = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class TopK:
    """Works in host memory: tensors of another device are copied there and back."""

    kept: int
    """K: 1 to 2048."""
    identifier: int = 7

    @property
    def name(self) -> str:
        """Canonical spec."""
        return f"topk:{self.kept}"

    def payload_bytes(self, n: int) -> int:
        """As the module says."""
        return sparse.payload_bytes(check_count(n), self.kept, _HEAD, _ENTRY_BITS)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        n = check_values(values)
        payload = output(out, self.payload_bytes(n), torch.uint8, values.device)
        host = payload if payload.device.type == "cpu" else torch.empty_like(payload, device="cpu")
        bits, records, done = values.cpu().numpy().view(np.int32), host.numpy(), 0
        for start, rows, width in sparse.chunks(n):
            piece = bits[start : start + rows * width].reshape(rows, width)
            size = rows * sparse.record_bytes(width, self.kept, _HEAD, _ENTRY_BITS)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            magnitudes = piece & np.int32(0x7FFFFFFF)
            where = sparse.strongest(magnitudes, sparse.kept_of(width, self.kept))
            chosen = np.take_along_axis(piece, where, 1)
            levels, large = _levels(np.abs(chosen.view(np.float32)))
            code = (chosen < 0) | (large.astype(np.int64) << 1)
            record[:, :_HEAD] = levels.to(torch.bfloat16).view(torch.uint8).numpy()
            record[:, _HEAD:] = sparse.pack(where << _VALUE_BITS | code, _ENTRY_BITS)
        return payload if payload is host else payload.copy_(host)

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`. Refuses indices that are out of range or do not ascend, too."""
        payload = check_payload(payload, self.payload_bytes(n), self.name, n)
        values = output(out, n, torch.float32, payload.device)
        host = values if values.device.type == "cpu" else torch.empty_like(values, device="cpu")
        bits, records, done = host.zero_().numpy().view(np.int32), payload.cpu().numpy(), 0
        for start, rows, width in sparse.chunks(n):
            size = rows * sparse.record_bytes(width, self.kept, _HEAD, _ENTRY_BITS)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            levels = torch.from_numpy(record[:, :_HEAD].copy()).view(torch.bfloat16)
            check_scales(levels, sparse.SMALLEST_NORMAL, _LARGEST_LEVEL, self.name, zero=True)
            k = sparse.kept_of(width, self.kept)
            entries = sparse.unpack(record[:, _HEAD:], k, _ENTRY_BITS, self.name).astype(np.int64)
            where = entries >> _VALUE_BITS
            sparse.check_indices(where, width, self.name)
            level = levels.to(torch.float32).numpy().view(np.int32)
            magnitude = np.take_along_axis(level, entries >> 1 & 1, 1)
            signed = np.where(entries & 1, magnitude | np.int32(-(2**31)), magnitude)
            piece = bits[start : start + rows * width].reshape(rows, width)
            np.put_along_axis(piece, where, signed, 1)
        return values if values is host else values.copy_(host)


def _levels(magnitudes: Array) -> tuple[Tensor, Array]:
    """Levels, fp32 [rows, 2], of fp32 [rows, k], and which of these are large, bool [rows, k]."""
    with np.errstate(invalid="ignore"):
        unit = magnitudes.max(1, keepdims=True).astype(np.float64) / _WHOLE
        unit = np.where(unit > 0, unit, 1.0)
        whole = np.rint(magnitudes / unit)
        total, k = whole.sum(1, keepdims=True), magnitudes.shape[1]
        limit = total / k
        for step in range(_STEPS + 1):
            large = whole >= limit
            count = large.sum(1, keepdims=True)
            above = (whole * large).sum(1, keepdims=True)
            high = above / count.clip(1)
            low = np.where(count < k, (total - above) / (k - count).clip(1), high)
            if step < _STEPS:
                limit = (low + high) / 2
        levels = torch.from_numpy((np.concatenate([low, high], 1) * unit).astype(np.float32))
    levels.clamp_(max=_LARGEST_LEVEL)
    return torch.where(levels < sparse.SMALLEST_NORMAL, 0.0, levels), large
