"""Splits flat buffers into blocks, for chains of elementwise operations.

On a CPU, memory traffic decides the time of such a chain. If the chain runs block by block, its
intermediate results stay in the cache and need no memory of the buffer's size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ON_DEVICE = 1 << 26
"""Values per block on a GPU: enough to keep it busy. An fp32 intermediate takes 256 MiB."""
PER_THREAD = 1 << 15
"""Values per block and thread on a CPU. PyTorch does not give a thread fewer values, and a core's
own cache holds several fp32 buffers of this size."""


def blocks(values: Tensor) -> Iterator[slice]:
    """Yields consecutive slices that cover flat `values` [n].

    Slices are cache-sized on a CPU. On other devices they are few and large, because every
    operation there costs a kernel launch.
    """
    length = values.numel()
    step = PER_THREAD * torch.get_num_threads() if values.device.type == "cpu" else ON_DEVICE
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
