"""Shared parts of the sparse codecs' GPU implementation, in tensor operations.

On a CPU the sparse codecs use numpy, which is faster there. The GPU implementation gives the same
bytes: it operates on whole numbers, or on float64 values that are rounded once. The host waits for
the GPU once per payload, to learn whether the payload is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilocox.errors import ExchangeError

PIECE = 1 << 24
"""Values of one pass. The sort keys of a pass take 128 MiB."""


def numpy_reaches(tensor: Tensor) -> bool:
    """Return True if the tensor is in host memory."""
    return tensor.device.type == "cpu"


class Refusals:
    """Reasons to refuse a payload, found on a device and read by the host once, in `settle`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: list[Tensor] = []
        self._reasons: list[str] = []

    def add(self, bad: Tensor, reason: str) -> None:
        """Refuse the payload with `reason` if any value of `bad` (bool, any shape) is True."""
        self._found.append(bad.any())
        self._reasons.append(reason)

    def settle(self) -> None:
        """Raise `ExchangeError` with the first reason that holds."""
        if not self._found:
            return
        for bad, reason in zip(torch.stack(self._found).tolist(), self._reasons, strict=True):
            if bad:
                raise ExchangeError(f"{self._name} payload refused: {reason}")


def pack_bits(stream: Tensor) -> Tensor:
    """Pack uint8 [..., bits] of zeros and ones into uint8 [..., ceil(bits / 8)].

    The first of eight bits becomes the lowest bit of its byte. The last byte is filled with zeros.
    """
    missing = -stream.shape[-1] % 8
    if missing:
        stream = torch.nn.functional.pad(stream, (0, missing))
    eights = stream.unflatten(-1, (-1, 8))
    packed: Tensor = eights[..., 0].clone()
    for place in range(1, 8):
        packed |= eights[..., place] << place
    return packed


def unpack_bits(data: Tensor) -> Tensor:
    """Unpack uint8 [..., bytes] into bits, uint8 [..., 8 x bytes], lowest bit of a byte first."""
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(-1) >> places & 1).flatten(-2)


def bad_scales(scales: Tensor, smallest: float, largest: float) -> Tensor:
    """Return True for each bf16 scale that is neither 0 nor in [`smallest`, `largest`].

    The test is that of `check_scales`.
    """
    bits = scales.view(torch.int16)
    limits = torch.tensor([smallest, largest], dtype=torch.bfloat16).view(torch.int16).tolist()
    bad: Tensor = (bits != 0) & ((bits < limits[0]) | (bits > limits[1]))
    return bad


def scale_reason(smallest: float, largest: float) -> str:
    """Return the reason for refusing a payload with a bad scale, in the words of `check_scales`."""
    return (
        f"it has a scale that is not finite or not from {smallest:.3g} to {largest:.3g}; no site's "
        "encoder writes that"
    )
