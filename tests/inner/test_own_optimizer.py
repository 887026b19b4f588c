"""An optimizer of a user's own: gradients divided, steps left out, state saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from dilocox.errors import CheckpointError, ConfigError
from dilocox.inner.own_optimizer import OwnOptimizer

pytestmark = pytest.mark.waits

Parameters = dict[str, nn.Parameter]


def tensors() -> Parameters:
    torch.manual_seed(0)
    return {
        "a.weight": nn.Parameter(torch.randn(3, 4)),
        "b.bias": nn.Parameter(torch.randn(5)),
        "empty": nn.Parameter(torch.zeros(0, 4)),
    }


def adam(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [parameters["a.weight"]]},
        {"params": [parameters["b.bias"]], "lr": 5e-4, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


class Handmade(torch.optim.Optimizer):
    """Steps one parameter at a time, by `move`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(list(parameters.values()), {"lr": 1e-3})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.move(parameter, self.state[parameter], group["lr"])

    def move(self, parameter: nn.Parameter, own: dict[str, Any], rate: float) -> None:
        raise AssertionError("the kinds below say how")


class Counting(Handmade):
    """Keeps its count as a Python number."""

    def move(self, parameter: nn.Parameter, own: dict[str, Any], rate: float) -> None:
        own["count"] = own.get("count", 0) + 1
        parameter.data.add_(parameter.grad, alpha=-rate * own["count"])


def stepped(optimizer: OwnOptimizer, parameters: Parameters, number: int, skip: float = 0) -> None:
    torch.manual_seed(number)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter) * 8
    optimizer.step(2e-3, torch.tensor(8.0), torch.tensor(skip))


def test_it_steps_as_the_optimizer_itself_does() -> None:
    own, plain = tensors(), tensors()
    wrapped, reference = OwnOptimizer(own, adam, 1e-3), adam(plain)
    for number in range(3):
        stepped(wrapped, own, number)
        torch.manual_seed(number)
        for parameter in plain.values():
            parameter.grad = torch.randn_like(parameter)
        # The schedule's rate, and half of it, as the groups were made.
        for group, rate in zip(reference.param_groups, (2e-3, 1e-3), strict=True):
            group["lr"] = rate
        reference.step()
    assert all(torch.equal(own[name], plain[name]) for name in own)
    before = own["a.weight"].detach().clone()
    stepped(wrapped, own, 4, skip=1.0)
    assert torch.equal(own["a.weight"], before)


@pytest.mark.parametrize("make", [adam, Counting])
def test_its_state_goes_on_bit_for_bit(make: object) -> None:
    whole, parts = tensors(), tensors()
    first = OwnOptimizer(whole, make, 1e-3)  # type: ignore[arg-type]
    assert first.state() == {}
    for number in range(2):
        stepped(first, whole, number)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    with torch.no_grad():
        for name, parameter in parts.items():
            parameter.copy_(whole[name])
    second = OwnOptimizer(parts, make, 1e-3)  # type: ignore[arg-type]
    second.load(saved)
    for number in range(2, 4):
        stepped(first, whole, number)
        stepped(second, parts, number)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert second.state().keys() == saved.keys()
    with pytest.raises(CheckpointError, match="of another model, cut or optimizer"):
        second.load({"exp_avg/other": torch.zeros(2)})


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_counts_go_where_kernels_of_a_device_need_them(option: str) -> None:
    """These kernels read the number of steps on the parameters' device."""
    saved = {"step/a": torch.tensor(3.0), "exp_avg/a": torch.ones(2), "exp_avg_sq/a": torch.ones(2)}
    places = {}
    for chosen in (False, True):
        parameters = {"a": nn.Parameter(torch.empty(2, device="meta"))}
        optimizer = OwnOptimizer(
            parameters, lambda given: torch.optim.AdamW(given.values(), lr=1e-3), 1e-3
        )
        made: Any = optimizer
        made._optimizer.param_groups[0][option] = chosen
        optimizer.load(saved)
        places[chosen] = {name: each.device.type for name, each in optimizer.state().items()}
        assert made._optimizer.param_groups[0][option] is chosen
    moments = {"exp_avg/a": "meta", "exp_avg_sq/a": "meta"}
    assert places == {False: {"step/a": "cpu", **moments}, True: {"step/a": "meta", **moments}}


class Mixed(Handmade):
    """Keeps state in other data types than its parameters."""

    def move(self, parameter: nn.Parameter, own: dict[str, Any], rate: float) -> None:
        own.setdefault("codes", torch.full(parameter.shape, 250, dtype=torch.uint8))
        own.setdefault("half", torch.full(parameter.shape, 0.3, dtype=torch.bfloat16))
        own["codes"] += 1


def test_state_of_any_data_type_goes_on_bit_for_bit() -> None:
    parameters = tensors()
    first, second = OwnOptimizer(parameters, Mixed, 1e-3), OwnOptimizer(tensors(), Mixed, 1e-3)
    stepped(first, parameters, 0)
    second.load(first.state())
    stepped(first, parameters, 1)  # the other one has tensors of its own
    found = second.state()
    assert found["codes/b.bias"].tolist() == [251] * 5
    assert {(name.partition("/")[0], each.dtype) for name, each in found.items()} == {
        ("codes", torch.uint8),
        ("half", torch.bfloat16),
    }


def test_moments_are_what_is_as_large_as_a_tensor() -> None:
    parameters = tensors()
    optimizer = OwnOptimizer(parameters, adam, 1e-3)
    stepped(optimizer, parameters, 0)
    assert sorted(tuple(moment.shape) for moment in optimizer.moments()) == [
        (3, 4), (3, 4), (5,), (5,),
    ]  # fmt: skip
    assert optimizer.second_moments()[0] == {}


def test_a_part_of_the_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pass all of parameters\.values\(\) to it"):
        OwnOptimizer(tensors(), lambda given: torch.optim.SGD([given["a.weight"]], lr=1.0), 1e-3)


def test_a_rank_without_rows_has_no_optimizer() -> None:
    optimizer = OwnOptimizer({"empty": nn.Parameter(torch.zeros(0, 4))}, adam, 1e-3)
    optimizer.step(1e-3, torch.tensor(1.0), torch.tensor(0.0))
    optimizer.load({})
    assert (optimizer.state(), optimizer.moments()) == ({}, [])
