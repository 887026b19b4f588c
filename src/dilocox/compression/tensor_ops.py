"""Shared parts of the sparse codecs' second form, in tensor operations for GPUs.

numpy is faster on a CPU and cannot work on another device. The tensor form gives the same bytes:
its operations are on whole numbers, or on float64 values that are rounded once. The host waits once
per payload, to learn whether the payload is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilocox.errors import ExchangeError

PIECE = 1 << 24
"""Values of one pass. The sort keys of a pass take 128 MiB."""


def numpy_reaches(tensor: Tensor) -> bool:
    """Whether a tensor is in host memory."""
    return tensor.device.type == "cpu"


class Refusals:
    """Reasons to refuse a payload, found on a device and read by the host once, in `settle`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: list[Tensor] = []
        self._reasons: list[str] = []

    def add(self, bad: Tensor, reason: str) -> None:
        """`bad`: bool of any shape; the payload is refused if one of them is true."""
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
    """uint8 [..., bits] of 0 and 1 to uint8 [..., ceil(bits / 8)].

    The first of eight is its byte's lowest bit; the last byte is filled with zeros.
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
    """uint8 [..., bytes] to its bits, uint8 [..., 8 x bytes], each byte's lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(-1) >> places & 1).flatten(-2)


def bad_scales(scales: Tensor, smallest: float, largest: float) -> Tensor:
    """Which of bf16 `scales` are neither 0 nor from `smallest` to `largest`: as `check_scales`."""
    bits = scales.view(torch.int16)
    limits = torch.tensor([smallest, largest], dtype=torch.bfloat16).view(torch.int16).tolist()
    bad: Tensor = (bits != 0) & ((bits < limits[0]) | (bits > limits[1]))
    return bad


def scale_reason(smallest: float, largest: float) -> str:
    """Why a payload with a `bad_scales` is refused, in the words of `check_scales`."""
    return (
        f"it has a scale that is not finite or not from {smallest:.3g} to {largest:.3g}; no site's "
        "encoder writes that"
    )
