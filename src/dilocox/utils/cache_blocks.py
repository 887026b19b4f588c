"""Flat buffers in blocks, for a chain of elementwise operations.

On a CPU such a chain costs what it moves through memory: done block by block, its intermediates
stay in the cache, and take no memory of the buffer's size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ON_DEVICE = 1 << 26
"""Values of a block elsewhere: enough for a GPU, and its intermediates take 256 MiB each."""
PER_THREAD = 1 << 15
"""Values of a block for each thread: PyTorch gives a thread no fewer, and a few fp32 buffers of so
many are in a core's own cache together."""


def blocks(values: Tensor) -> Iterator[slice]:
    """Slices of flat `values` [n] that follow one another; few and large ones on another device
    than a CPU, where every operation is a launch of its own."""
    length = values.numel()
    step = PER_THREAD * torch.get_num_threads() if values.device.type == "cpu" else ON_DEVICE
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
