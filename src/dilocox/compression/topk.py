"""The K largest of every 4,096 values, in 2 bits each (SparseLoCo's form).

Payload: one record per chunk of values. `dilocox.compression.sparse` gives the chunk's length,
which depends on K; the last chunk may be shorter. A record of a chunk of c values holds
k = ceil(K * c / 4096) of them. A record begins with two bf16 levels. Codes of 2 bits and indices
follow, packed as in `dilocox.compression.sparse`. In a code, bit 0 means negative, bit 1 the second
level.

A record has 4 + ceil((k * (3 + l) + (c >> l)) / 8) bytes, with the l >= 0 for which this is least:

- K = 5: 140 bytes per 65,536 values, 14.0 bits per sent value,
- K = 16: 100 bytes per 16,384 values, 12.5 bits per sent value,
- K = 64: 84 bytes per 4,096 values, 10.5 bits per sent value.

The levels are those of `dilocox.compression.two_bit_levels` for the kept values of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilocox.compression import sparse, tensor_ops, tensor_sparse, tensor_two_bit_levels
from dilocox.compression.base import (
    check_count,
    check_number,
    check_payload,
    check_values,
    output,
)
from dilocox.compression.two_bit_levels import HEAD, from_codes, to_codes
from dilocox.config.codec_kinds import LARGEST_KEPT

_BITS = 2


@dataclass(frozen=True)
class TopK:
    """Codec `topk:K`. It works on the device of its tensors, with the same bytes everywhere."""

    kept: int
    """K: 1 to 2048."""
    identifier: int = 7

    def __post_init__(self) -> None:
        check_number(f"topk:{self.kept}", "K", self.kept, 1, LARGEST_KEPT)

    @property
    def name(self) -> str:
        """Canonical spec."""
        return f"topk:{self.kept}"

    @property
    def numbers(self) -> tuple[int, int]:
        """See `Codec`: K, and 0."""
        return self.kept, 0

    def payload_bytes(self, n: int) -> int:
        """Return the size that the module's docstring gives."""
        return sparse.payload_bytes(check_count(n), self.kept, HEAD, _BITS)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        n = check_values(values)
        payload = output(out, self.payload_bytes(n), torch.uint8, values.device)
        if not tensor_ops.numpy_reaches(values):
            return self._encode_there(values, payload)
        bits, records, done = values.numpy().view(np.int32), payload.numpy(), 0
        for start, rows, width in sparse.chunks(n, self.kept):
            piece = bits[start : start + rows * width].reshape(rows, width)
            size = rows * sparse.record_bytes(width, self.kept, HEAD, _BITS)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            k = sparse.kept_of(width, self.kept)
            found = sparse.strongest(piece & np.int32(0x7FFFFFFF), k)
            chosen = piece.reshape(-1)[found].reshape(rows, k)
            where = sparse.indices_of(found, rows, width)
            record[:, :HEAD], codes = to_codes(chosen)
            record[:, HEAD:] = sparse.pack(where, codes, width, _BITS)
        return payload

    def _encode_there(self, values: Tensor, payload: Tensor) -> Tensor:
        """`encode` in tensor operations."""
        bits, done = values.view(torch.int32), 0
        for start, rows, width in sparse.chunks(values.numel(), self.kept, tensor_ops.PIECE):
            piece = bits[start : start + rows * width].view(rows, width)
            size = rows * sparse.record_bytes(width, self.kept, HEAD, _BITS)
            record = payload[done : done + size].view(rows, -1)
            done += size
            where = tensor_sparse.strongest(piece & 0x7FFFFFFF, sparse.kept_of(width, self.kept))
            record[:, :HEAD], codes = tensor_two_bit_levels.to_codes(piece.gather(1, where))
            record[:, HEAD:] = tensor_sparse.pack(where, codes, width, _BITS)
        return payload

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`. Also refuses indices that no encoder writes."""
        payload = check_payload(payload, self.payload_bytes(n), self.name, n)
        values = output(out, n, torch.float32, payload.device).zero_()
        if not tensor_ops.numpy_reaches(payload):
            return self._decode_there(payload, values)
        bits, records, done = values.numpy().view(np.int32), payload.numpy(), 0
        for start, rows, width in sparse.chunks(n, self.kept):
            size = rows * sparse.record_bytes(width, self.kept, HEAD, _BITS)
            record = records[done : done + size].reshape(rows, -1)
            done += size
            k = sparse.kept_of(width, self.kept)
            where, codes = sparse.unpack(record[:, HEAD:], k, width, _BITS, self.name)
            piece = bits[start : start + rows * width]
            piece[sparse.places_of(where, width)] = from_codes(record[:, :HEAD], codes, self.name)
        return values

    def _decode_there(self, payload: Tensor, values: Tensor) -> Tensor:
        """`decode` in tensor operations; `values` are zeros."""
        bits, done, refusals = values.view(torch.int32), 0, tensor_ops.Refusals(self.name)
        for start, rows, width in sparse.chunks(values.numel(), self.kept, tensor_ops.PIECE):
            size = rows * sparse.record_bytes(width, self.kept, HEAD, _BITS)
            record = payload[done : done + size].view(rows, -1)
            done += size
            k = sparse.kept_of(width, self.kept)
            where, codes = tensor_sparse.unpack(record[:, HEAD:], k, width, _BITS, refusals)
            piece = bits[start : start + rows * width].view(rows, width)
            piece.scatter_(
                1, where, tensor_two_bit_levels.from_codes(record[:, :HEAD], codes, refusals)
            )
        refusals.settle()
        return values


def build_topk(kept: int, *_: int) -> TopK:
    """`topk:K`."""
    return TopK(kept)
