"""Dense codecs: every value in a floating-point format of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression.base import (
    check_count,
    check_payload,
    check_values,
    output,
    pieces,
    refuse_non_finite,
)


@dataclass(frozen=True)
class Dense:
    """Values rounded to `dtype`, to nearest even; fp32 is the identity on bits.

    A value beyond the largest finite value of `dtype` (fp16: 65504) saturates there instead of
    becoming infinite: with error feedback the residual keeps the rest for the next rounds,
    and without it a bounded error is better than a lost run.
    """

    name: str
    identifier: int
    dtype: torch.dtype
    numbers: tuple[int, int] = (0, 0)

    def payload_bytes(self, n: int) -> int:
        """2n bytes (fp16, bf16) or 4n (fp32)."""
        return check_count(n) * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        n = check_values(values)
        payload = output(out, self.payload_bytes(n), torch.uint8, values.device)
        if self.dtype == torch.float32:
            return payload.copy_(values.view(torch.uint8))
        written = payload.view(self.dtype)
        largest = torch.finfo(self.dtype).max
        for start, end in pieces(n, values.device):
            written[start:end].copy_(values[start:end].clamp(-largest, largest))
        return payload

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        payload = check_payload(payload, self.payload_bytes(n), self.name, n)
        values = output(out, n, torch.float32, payload.device)
        values.copy_(payload.view(self.dtype))
        refuse_non_finite(values, self.name)
        return values
