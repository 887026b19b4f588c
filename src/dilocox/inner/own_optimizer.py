"""An inner optimizer that a user of the Python API brings, behind what `InnerOptimizer` offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dilocox.errors import CheckpointError, ConfigError

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
"""Full names of this rank's trained tensors -> an optimizer of them.

The tensors are plain, fp32, and hold this shard's rows alone: the optimizer must treat elements, or
rows, one by one. Groups keep their ratio of learning rates, the schedule sets the rates.
"""
_NUMBER = "number/"
"""Begins names of state that the optimizer keeps as Python numbers."""


class OwnOptimizer:
    """Wraps an optimizer: gradients are divided and steps left out before it sees them."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], make: OptimizerFactory, learning_rate: float
    ) -> None:
        """`learning_rate`: `inner.learning_rate`, to which the groups' own rates are compared.

        Raises `ConfigError` for an optimizer of other tensors, or of a part of them.
        """
        # A shard of a dimension smaller than the number of shards may have no rows.
        self._parameters = {name: p for name, p in parameters.items() if p.numel() > 0}
        self._optimizer = make(self._parameters) if self._parameters else None
        if self._optimizer is None:
            return
        groups = self._optimizer.param_groups
        given = {id(parameter) for parameter in self._parameters.values()}
        if {id(parameter) for group in groups for parameter in group["params"]} != given:
            raise ConfigError(
                "optimizer: its groups do not hold exactly the tensors that it was given; pass "
                "all of parameters.values() to it"
            )
        self._ratios = [float(group["lr"]) / learning_rate for group in groups]

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """One step with gradients / `divisor`, or nothing at all where `skip` is 1.

        Both are fp32 scalars on the parameters' device. `skip` is waited for there.
        """
        if self._optimizer is None or bool(skip):
            return
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = learning_rate * ratio
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        with torch.enable_grad():
            self._optimizer.step()

    def reset(self) -> None:
        """Forget the state."""
        if self._optimizer is not None:
            self._optimizer.state.clear()

    def state(self) -> dict[str, Tensor]:
        """Live state: `KEY/NAME`, and `number/KEY/NAME` (fp64, a copy) of Python numbers.

        Empty before the first step.
        """
        found: dict[str, Tensor] = {}
        if self._optimizer is None:
            return found
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{key}/{name}"] = value
                elif isinstance(value, int | float):
                    found[f"{_NUMBER}{key}/{name}"] = torch.tensor(value, dtype=torch.float64)
        return found

    def moments(self) -> list[Tensor]:
        """The storage of all state that is as large as its tensor."""
        if self._optimizer is None:
            return []
        return [
            value
            for parameter in self._parameters.values()
            for value in self._optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]

    def second_moments(self) -> tuple[dict[str, Tensor], Tensor]:
        """None that sites could share."""
        return {}, torch.ones(())

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` in, bit for bit. Raises `CheckpointError` for state of other tensors."""
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for full, tensor in state.items():
            key, _, name = full.removeprefix(_NUMBER).partition("/")
            if name not in self._parameters:
                raise CheckpointError(
                    f"optimizer state: {full} is of another model, cut or optimizer; load it with "
                    "the run file and the code that wrote it"
                )
            parameter = self._parameters[name]
            value = tensor.item() if full.startswith(_NUMBER) else _like(parameter, tensor)
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # counts of steps; a rate that is whole reads the same
            self._optimizer.state[parameter][key] = value


def _like(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """A copy where the optimizer needs it: counts may stay on the CPU, as PyTorch's own do."""
    device = parameter.device if tensor.dim() else torch.device("cpu")
    return tensor.detach().to(device, copy=True)
