"""The two levels that stand for the magnitudes of values that are sent in 2 bits.

They are the mean magnitudes of the small and of the large, divided where the squared error is
least. (Dividing at their mean costs nothing to speak of for normal values, but three times the
error for Student's t with 3 degrees of freedom.) Magnitudes enter sums as whole numbers up to 2^30
(of the row's largest): exact in float64 in every order, so levels do not depend on the machine.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dilocox.compression.base import check_scales
from dilocox.compression.sparse import Array, places_of

HEAD = 4
"""Bytes of two levels."""
SMALLEST_NORMAL = 2.0**-126
LARGEST_LEVEL = torch.finfo(torch.bfloat16).max
WHOLE = 2.0**30
"""The whole number that a row's largest magnitude enters sums as."""
_MAGNITUDE, _SIGN = np.int32(0x7FFFFFFF), np.int32(-(2**31))


def to_codes(bits: Array, zeros: bool = True) -> tuple[Array, Array]:
    """What fp32 values are sent as: levels, uint8 [rows, HEAD], and codes, int16 [rows, k].

    Values come by their bits, int32 [rows, k]. In a code 1 says negative, 2 the second level.
    Without `zeros` those are not sent: levels are those of the others, and codes of zeros mean
    nothing.
    """
    levels, large = _two_levels(bits & _MAGNITUDE, zeros)
    return levels.to(torch.bfloat16).view(torch.uint8).numpy(), (bits < 0) | large << np.int16(1)


def from_codes(head: Array, codes: Array, name: str) -> Array:
    """The fp32 values, by their bits, int32 [rows, k], that `to_codes` made of what was sent.

    Raises `ExchangeError` that names the codec for levels that it does not make.
    """
    levels = torch.from_numpy(head.copy()).view(torch.bfloat16)
    check_scales(levels, SMALLEST_NORMAL, LARGEST_LEVEL, name, zero=True)
    level = levels.to(torch.float32).numpy().view(np.int32)
    found: Array = level.reshape(-1)[places_of(codes >> 1, 2)] | -(codes & 1) & _SIGN
    return found


def _two_levels(magnitudes: Array, zeros: bool) -> tuple[Tensor, Array]:
    """Levels, fp32 [rows, 2], of magnitudes by their bits, int32 [rows, k], and which are large.

    Levels are 0 or normal numbers that bf16 can hold. Without `zeros` those do not count.
    """
    ascending = np.sort(magnitudes, axis=1)
    k = ascending.shape[1]
    with np.errstate(invalid="ignore"):
        values = ascending.view(np.float32).astype(np.float64)
        unit = values[:, -1:] / WHOLE
        sums = np.cumsum(np.rint(values / np.where(unit > 0, unit, 1.0)), axis=1)
        total, below = sums[:, -1:], sums[:, : max(k - 1, 1)]
        # They are the first of a row, and add nothing to sums.
        left_out = 0 if zeros else np.sum(ascending == 0, axis=1, keepdims=True)
        first = np.arange(1, max(k, 2))
        count = np.maximum(first - left_out, 1)
        rest = np.maximum(np.minimum(k - first, k - left_out), 1)
        # What is divided between n and k - n values with sums s and t: the error falls with this.
        cut = np.argmax(below**2 / count + (total - below) ** 2 / rest, axis=1, keepdims=True)
        low = np.take_along_axis(below / count, cut, 1)
        high = np.take_along_axis((total - below) / rest, cut, 1) if k > 1 else low
        levels = torch.from_numpy((np.concatenate([low, high], 1) * unit).astype(np.float32))
    levels.clamp_(max=LARGEST_LEVEL)
    large = magnitudes >= np.take_along_axis(ascending, np.minimum(cut + 1, k - 1), 1)
    return torch.where(levels < SMALLEST_NORMAL, 0.0, levels), large
