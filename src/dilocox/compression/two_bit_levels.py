"""Two levels per row, for the magnitudes of values that are sent in 2 bits.

The values of a row are divided into small and large ones where the squared error is least. The
levels are the mean magnitude of the small values and that of the large values. A division at the
mean of all magnitudes would hardly raise the error for normally distributed values. For
Student's t with 3 degrees of freedom, the error would triple.

Magnitudes enter the sums as whole numbers up to 2^30, in units of the row's largest magnitude over
2^30. The sums are exact in float64 in every order, so levels do not depend on the machine.
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
"""Whole number that stands for a row's largest magnitude in the sums."""
_MAGNITUDE, _SIGN = np.int32(0x7FFFFFFF), np.int32(-(2**31))


def to_codes(bits: Array, zeros: bool = True) -> tuple[Array, Array]:
    """Encode fp32 values to levels, uint8 [rows, HEAD], and codes, int16 [rows, k].

    `bits` are the bits of the fp32 values, int32 [rows, k]. In a code, bit 0 means negative, bit 1
    the second level. `zeros`: False if the caller sends no zeros; the levels then ignore zeros, and
    the codes of zeros are meaningless.
    """
    levels, large = _two_levels(bits & _MAGNITUDE, zeros)
    return levels.to(torch.bfloat16).view(torch.uint8).numpy(), (bits < 0) | large << np.int16(1)


def from_codes(head: Array, codes: Array, name: str) -> Array:
    """Decode levels and codes of `to_codes`; return the bits of fp32 values, int32 [rows, k].

    Raises `ExchangeError`, which names the codec `name`, for levels that `to_codes` never makes.
    """
    levels = torch.from_numpy(head.copy()).view(torch.bfloat16)
    check_scales(levels, SMALLEST_NORMAL, LARGEST_LEVEL, name, zero=True)
    level = levels.to(torch.float32).numpy().view(np.int32)
    found: Array = level.reshape(-1)[places_of(codes >> 1, 2)] | -(codes & 1) & _SIGN
    return found


def _two_levels(magnitudes: Array, zeros: bool) -> tuple[Tensor, Array]:
    """Return the levels, fp32 [rows, 2], and True for each large magnitude, [rows, k].

    `magnitudes` are the bits of fp32 magnitudes, int32 [rows, k]. Levels are 0 or normal numbers
    within the range of bf16. If `zeros` is False, zeros do not count.
    """
    ascending = np.sort(magnitudes, axis=1)
    k = ascending.shape[1]
    with np.errstate(invalid="ignore"):
        values = ascending.view(np.float32).astype(np.float64)
        unit = values[:, -1:] / WHOLE
        sums = np.cumsum(np.rint(values / np.where(unit > 0, unit, 1.0)), axis=1)
        total, below = sums[:, -1:], sums[:, : max(k - 1, 1)]
        # Zeros are the first values of a sorted row, and add nothing to the sums.
        left_out = 0 if zeros else np.sum(ascending == 0, axis=1, keepdims=True)
        first = np.arange(1, max(k, 2))
        count = np.maximum(first - left_out, 1)
        rest = np.maximum(np.minimum(k - first, k - left_out), 1)
        # For n values with sum s and k - n values with sum t, the squared error is a constant less
        # s^2 / n + t^2 / (k - n). So the largest value marks the best cut.
        cut = np.argmax(below**2 / count + (total - below) ** 2 / rest, axis=1, keepdims=True)
        low = np.take_along_axis(below / count, cut, 1)
        high = np.take_along_axis((total - below) / rest, cut, 1) if k > 1 else low
        levels = torch.from_numpy((np.concatenate([low, high], 1) * unit).astype(np.float32))
    levels.clamp_(max=LARGEST_LEVEL)
    large = magnitudes >= np.take_along_axis(ascending, np.minimum(cut + 1, k - 1), 1)
    return torch.where(levels < SMALLEST_NORMAL, 0.0, levels), large
