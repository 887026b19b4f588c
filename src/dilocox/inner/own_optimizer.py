"""Adapter for an inner optimizer of a user of the Python API, with `InnerOptimizer`'s interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dilocox.errors import CheckpointError, ConfigError

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of this rank's trained tensors, which are given by full name.

The tensors are plain and fp32, and hold this shard's rows only. So the optimizer must treat each
element, or each row, separately. The schedule sets the learning rates; parameter groups keep the
ratios of their rates.
"""
_NUMBER = "number/"
"""Prefix of names of state that the optimizer keeps as Python numbers."""


class OwnOptimizer:
    """Wraps an optimizer: divides gradients before its step, and leaves out skipped steps."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], make: OptimizerFactory, learning_rate: float
    ) -> None:
        """Make the optimizer.

        `learning_rate` is `inner.learning_rate`; the ratio of each group's rate to it is kept.
        Raises `ConfigError` if the optimizer does not hold exactly the given tensors.
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
        """Take one step with gradients / `divisor`; change nothing if `skip` is 1.

        `divisor` and `skip` are fp32 scalars on the parameters' device. The host waits for `skip`.
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

    def state(self) -> dict[str, Tensor]:
        """Return the live state: `KEY/NAME` for tensors, `number/KEY/NAME` for Python numbers.

        Numbers are fp64 copies. The state is empty before the first step.
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
        """Return the storage of all state tensors that have the shape of their parameter."""
        if self._optimizer is None:
            return []
        return [
            value
            for parameter in self._parameters.values()
            for value in self._optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]

    def second_moments(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return no second moments: the adapter does not know which ones sites could share."""
        return {}, torch.ones(())

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state`, bit for bit. Raises `CheckpointError` if it has other tensors."""
        if self._optimizer is None:
            return
        found: dict[str, dict[str, Tensor | int | float]] = {name: {} for name in self._parameters}
        for full, tensor in state.items():
            key, _, name = full.removeprefix(_NUMBER).partition("/")
            if name not in found:
                raise CheckpointError(
                    f"optimizer state: {full} is of another model, cut or optimizer; load it with "
                    "the run file and the code that wrote it"
                )
            parameter = self._parameters[name]
            value = tensor.item() if full.startswith(_NUMBER) else _like(parameter, tensor)
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # step counts are int; a whole-numbered float works as int, too
            found[name][key] = value
        document = self._optimizer.state_dict()
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        by_place = {place: found[names[id(parameter)]] for place, parameter in enumerate(held)}
        document["state"] = {place: own for place, own in by_place.items() if own}
        # PyTorch puts scalars on the device that the kernels need.
        self._optimizer.load_state_dict(document)
        for place, parameter in enumerate(held):
            _undo_casts(self._optimizer.state.get(parameter, {}), by_place[place])


def _like(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """Copy `tensor` to the parameter's device, and a scalar to the CPU."""
    device = parameter.device if tensor.dim() else torch.device("cpu")
    return tensor.detach().to(device, copy=True)


def _undo_casts(state: dict[str, Any], exact: Mapping[str, Tensor | int | float]) -> None:
    """Put back the tensors of `exact` that PyTorch has cast to the parameter's data type."""
    for key, value in exact.items():
        now = state.get(key)
        if isinstance(now, Tensor) and isinstance(value, Tensor) and now.dtype != value.dtype:
            state[key] = value.to(now.device)
