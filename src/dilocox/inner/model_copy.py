"""A second model in fp32, whose loss is computed while the first one trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def loss_of_copy(
    chunk: nn.Module, parameters: Mapping[str, Tensor], loss: Callable[[nn.Module], Tensor]
) -> Callable[[Mapping[str, Tensor]], float]:
    """Return a function from tensors by full name to the loss of a copy of `chunk` with them.

    Tensors that the function is not given keep their last values. One thread at a time may call it.

    Args:
        chunk: the whole model, not sharded.
        parameters: the model's parameters in fp32, by full name.
        loss: returns the loss of the copy, a scalar.
    """
    # Buffers are fp32 in any case.
    copied = copy.deepcopy(chunk).float().eval()
    names = {full: name for name, full in copied.full_names().items()}  # type: ignore[operator]
    own = dict(copied.named_parameters())

    def load(tensors: Mapping[str, Tensor]) -> None:
        for full, tensor in tensors.items():
            own[names[full]].copy_(tensor)

    def compute(tensors: Mapping[str, Tensor]) -> float:
        with torch.no_grad():
            load(tensors)
            return float(loss(copied))

    with torch.no_grad():
        load(parameters)
    return compute
