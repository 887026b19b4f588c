"""The two levels that stand for the magnitudes of values that are sent in 2 bits.

They are the mean magnitudes of the small and of the large, divided where the squared error is
least. (Dividing at their mean costs nothing to speak of for normal values, but three times the
error for Student's t with 3 degrees of freedom.) Magnitudes enter sums as whole numbers up to 2^30
(of the row's largest): exact in float64 in every order, so levels do not depend on the machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

SMALLEST_NORMAL = 2.0**-126
LARGEST_LEVEL = torch.finfo(torch.bfloat16).max
_WHOLE = 2.0**30


def two_levels(magnitudes: Array) -> tuple[Tensor, Array]:
    """Levels, fp32 [rows, 2], of magnitudes by their bits, int32 [rows, k], and which are large.

    Levels are 0 or normal numbers that bf16 can hold.
    """
    ascending = np.sort(magnitudes, axis=1)
    k = ascending.shape[1]
    with np.errstate(invalid="ignore"):
        values = ascending.view(np.float32).astype(np.float64)
        unit = values[:, -1:] / _WHOLE
        sums = np.cumsum(np.rint(values / np.where(unit > 0, unit, 1.0)), axis=1)
        total, below = sums[:, -1:], sums[:, : max(k - 1, 1)]
        count = np.arange(1, k) if k > 1 else np.ones(1)
        rest = np.maximum(k - count, 1)
        # What is divided between n and k - n values with sums s and t: the error falls with this.
        cut = np.argmax(below**2 / count + (total - below) ** 2 / rest, axis=1, keepdims=True)
        low = np.take_along_axis(below / count, cut, 1)
        high = np.take_along_axis((total - below) / rest, cut, 1) if k > 1 else low
        levels = torch.from_numpy((np.concatenate([low, high], 1) * unit).astype(np.float32))
    levels.clamp_(max=LARGEST_LEVEL)
    large = magnitudes >= np.take_along_axis(ascending, np.minimum(cut + 1, k - 1), 1)
    return torch.where(levels < SMALLEST_NORMAL, 0.0, levels), large
