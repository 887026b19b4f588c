"""bf16 copies of fp32 parameters. The model computes with the copies; the parameters are
trained."""

from __future__ import annotations

from collections.abc import Container
from functools import partial

import torch
from torch import Tensor, nn


class WeightCopies:
    """Gives a module parameters of another dtype, and keeps its own as masters.

    The masters are the module's parameters as they were: the same objects on the same storage. An
    optimizer trains the masters. `refresh` copies the masters' values into the module.
    A backward pass leaves a gradient at a copy. A hook adds this gradient at once to the master's
    `.grad`, in the master's dtype. So gradients of micro-batches are never summed in bf16.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, kept: Container[str] = frozenset()
    ) -> None:
        """Replace the parameters of `module` by copies in `dtype`.

        `kept`: names of parameters that the module computes with as they are.
        """
        self._masters: list[nn.Parameter] = []
        self._copies: list[nn.Parameter] = []
        self._by_copy: dict[int, nn.Parameter] = {}
        made: dict[int, nn.Parameter] = {}
        for path, each in module.named_modules():
            for name, master in each._parameters.items():
                if (f"{path}.{name}" if path else name) in kept:
                    continue
                if master is None or (master.dtype == dtype and not master.requires_grad):
                    continue  # frozen weights that have the dtype already need no copy
                if id(master) not in made:  # shared parameters stay one
                    made[id(master)] = self._copied(master, dtype)
                each._parameters[name] = made[id(master)]

    def _copied(self, master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        copied = nn.Parameter(master.detach().to(dtype), master.requires_grad)
        if master.requires_grad:
            copied.register_post_accumulate_grad_hook(partial(_add_to, master))
        self._masters.append(master)
        self._copies.append(copied)
        self._by_copy[id(copied)] = master
        return copied

    def master(self, copied: nn.Parameter) -> nn.Parameter:
        """Return the master of `copied`, a parameter of the module; itself if it is no copy."""
        return self._by_copy.get(id(copied), copied)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters' values. Call this before the forward passes of every step."""
        torch._foreach_copy_([*self._copies], [*self._masters])

    def collect(self) -> None:
        """Add the gradients of the copies to those of the masters.

        Call this after the weight half of a split backward pass, which sets the gradients of the
        copies without running hooks.
        """
        for master, copied in zip(self._masters, self._copies, strict=True):
            if copied.grad is not None:
                _add_to(master, copied)


@torch.no_grad()
def _add_to(master: nn.Parameter, copied: Tensor) -> None:
    gradient = copied.grad
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient
    copied.grad = None
