"""State of the optimizers, and of other objects, of a loop of the user's own.

The state becomes tensors by name, so that a checkpoint holds it without a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dilocox.errors import CheckpointError, ConfigError
from dilocox.inner.fsdp import local

_GROUP = "group/"
_NUMBER = "number/"
_OBJECT = "object/"
_TENSOR = "__tensor__"


class Stateful(Protocol):
    """An object whose state a checkpoint can hold, such as a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: JSON values and tensors, in dicts and lists."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore a state."""


class LoopOptimizers:
    """The optimizers of a user's loop, and their state by the names of the model's tensors."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Mapping[str, Stateful],
    ) -> None:
        """Check the optimizers.

        Args:
            parameters: the model's trained tensors by full name.
            optimizers: optimizers that together hold each of these tensors once, and no other.
            objects: further objects whose state belongs to a checkpoint, by name.

        Raises `ConfigError` otherwise.
        """
        self._optimizers, self._objects = list(optimizers), dict(objects)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        for name, each in self._objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise ConfigError(
                    f"state: {name} has no state_dict and load_state_dict; pass an object that has"
                )
        if not self._optimizers:
            raise ConfigError("optimizer: none was given; pass the loop's optimizer, or a list")
        seen: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._check(parameter, seen)
                    seen.add(id(parameter))
        missing = [name for name, parameter in parameters.items() if id(parameter) not in seen]
        if missing:
            raise ConfigError(
                f"optimizer: {missing[0]} is trained by none of the optimizers ({len(missing)} "
                "such tensors); pass all optimizers of the loop, or freeze these tensors"
            )

    def _check(self, parameter: Tensor, seen: set[int]) -> None:
        name = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                f"optimizer: a tensor of shape {tuple(parameter.shape)} is no trained tensor of "
                "the model, so sites would not exchange it; make it part of the model, or leave "
                "its optimizer out"
            )
        if id(parameter) in seen:
            raise ConfigError(f"optimizer: {name} is in two parameter groups; leave one out")

    def state(self) -> dict[str, Tensor]:
        """Return the state by name; numbers are fp64 copies, tensors are the live ones.

        Raises `CheckpointError` for a state that is neither a tensor nor a number.
        """
        found: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self._optimizers):
            for place, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key != "params" and _is_numbers(value):
                        found[f"{_GROUP}{number}.{place}/{key}"] = _as_tensor(value)
            for parameter, own in optimizer.state.items():
                name = self._names.get(id(parameter))
                if name is None:
                    raise CheckpointError(
                        f"optimizer: a tensor of shape {tuple(parameter.shape)} was added since "
                        "the site began; give dilocox.site all parameter groups"
                    )
                for key, value in own.items():
                    if isinstance(value, Tensor):
                        found[f"{key}/{name}"] = local(value)
                    elif _is_numbers(value):
                        found[f"{_NUMBER}{key}/{name}"] = _as_tensor(value)
                    elif value is not None:
                        raise CheckpointError(
                            f"optimizer: its state {key} of {name} is a {type(value).__name__}; "
                            "only tensors and numbers are kept: use another optimizer, or set "
                            "checkpoint.every_rounds = 0"
                        )
        for name, each in self._objects.items():
            try:
                state = each.state_dict()
            except Exception as error:
                said = str(error).partition("\n")[0]
                raise CheckpointError(
                    f"state: state_dict of {name} failed ({type(error).__name__}: {said})"
                ) from error
            found |= _flattened(f"{_OBJECT}{name}", state)
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state, bit for bit.

        Raises `CheckpointError` for a state of other tensors, optimizers or objects.
        """
        rest = dict(state)
        for name, each in self._objects.items():
            each.load_state_dict(_unflattened(f"{_OBJECT}{name}", rest))
        known = {
            f"{_GROUP}{number}.{place}": group
            for number, optimizer in enumerate(self._optimizers)
            for place, group in enumerate(optimizer.param_groups)
        }
        tensors = {
            self._names[id(each)]: each
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        by_tensor: dict[str, dict[str, Any]] = {name: {} for name in self._names.values()}
        for full, tensor in rest.items():
            if full.startswith(_GROUP):
                where, _, key = full.rpartition("/")
                if where not in known:
                    raise self._other(full)
                known[where][key] = _as_before(tensor, known[where].get(key))
                continue
            key, _, name = full.removeprefix(_NUMBER).partition("/")
            if name not in by_tensor or full.startswith(_OBJECT):
                raise self._other(full)
            whole = _number(tensor) if full.startswith(_NUMBER) else tensor
            by_tensor[name][key] = _divided_like(whole, tensors[name])
        for optimizer in self._optimizers:
            document = optimizer.state_dict()
            held = [p for group in optimizer.param_groups for p in group["params"]]
            document["state"] = {
                place: own
                for place, parameter in enumerate(held)
                if (own := by_tensor[self._names[id(parameter)]])
            }
            # PyTorch puts each tensor on the device that its kernels need.
            optimizer.load_state_dict(document)

    def _other(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"optimizer state: {name} is of another model, optimizer or state=; start the site "
            "with the program that wrote the checkpoint"
        )


def _divided_like(value: Any, parameter: Tensor) -> Any:
    """Return a tensor of this process's rows as a part of a divided tensor, if `parameter` is one.

    Scalars and numbers are the same in all processes.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != parameter.to_local().shape or not value.dim():
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _is_numbers(value: Any) -> bool:
    numbers = value if isinstance(value, tuple | list) else (value,)
    plain = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    return (plain and len(numbers) > 0) or (isinstance(value, Tensor) and value.dim() == 0)


def _as_tensor(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach().cpu()


def _number(tensor: Tensor) -> int | float:
    value = float(tensor)
    return int(value) if value.is_integer() else value


def _as_before(tensor: Tensor, now: Any) -> Any:
    """Return a group's value from a checkpoint, of the type that the group has now."""
    if isinstance(now, Tensor):
        return torch.as_tensor(tensor, dtype=now.dtype, device=now.device).clone()
    if isinstance(now, tuple | list):
        return type(now)(float(each) for each in tensor)
    return _number(tensor) if isinstance(now, int) else float(tensor)


def _flattened(name: str, state: Any) -> dict[str, Tensor]:
    """Return an object's state as tensors: one with the JSON document, and those within it.

    Raises `CheckpointError` for values that are neither tensors nor JSON.
    """
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {_TENSOR: len(tensors) - 1}
        if isinstance(value, dict):
            return [[plain(key), plain(each)] for key, each in value.items()]
        if isinstance(value, list | tuple):
            return {type(value).__name__: [plain(each) for each in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CheckpointError(
            f"state: {name.removeprefix(_OBJECT)} holds a {type(value).__name__}; only numbers, "
            "texts, tensors, dicts and lists are kept"
        )

    text = json.dumps(plain(state)).encode()
    found = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    return found | {f"{name}/{number}": tensor for number, tensor in enumerate(tensors)}


def _unflattened(name: str, state: dict[str, Tensor]) -> Any:
    """Take an object's state out of `state`. Raises `CheckpointError` if it is not there."""
    if name not in state:
        raise CheckpointError(
            f"state: the checkpoint has none of {name.removeprefix(_OBJECT)}; start the site with "
            "the program that wrote the checkpoint"
        )
    document = json.loads(state.pop(name).cpu().numpy().tobytes())

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return {whole(key): whole(each) for key, each in value}
        if isinstance(value, dict):
            ((kind, held),) = value.items()
            if kind == _TENSOR:
                return state.pop(f"{name}/{held}").clone()
            return (tuple if kind == "tuple" else list)(whole(each) for each in held)
        return value

    return whole(document)
