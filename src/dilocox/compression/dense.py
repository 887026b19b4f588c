"""Dense codecs: every value is sent as one floating-point number."""

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
    """Rounds values to `dtype`, to nearest even. With fp32, all bits stay the same.

    A value beyond the largest finite value of `dtype` (fp16: 65504) saturates at that value instead
    of becoming infinite. With error feedback, the residual keeps the rest for later rounds. Without
    it, a bounded error is better than a lost run.
    """

    name: str
    identifier: int
    dtype: torch.dtype
    numbers: tuple[int, int] = (0, 0)

    def payload_bytes(self, n: int) -> int:
        """Return 2n bytes (fp16, bf16) or 4n bytes (fp32)."""
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


def build_none(*_: int) -> Dense:
    """`none`: fp32 as it is."""
    return Dense("none", 1, torch.float32)


def build_fp16(*_: int) -> Dense:
    """`fp16`."""
    return Dense("fp16", 2, torch.float16)


def build_bf16(*_: int) -> Dense:
    """`bf16`."""
    return Dense("bf16", 3, torch.bfloat16)
