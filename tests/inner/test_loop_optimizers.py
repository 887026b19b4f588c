"""The state of a loop's optimizers and objects, as tensors by name and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dilocox.errors import CheckpointError, ConfigError
from dilocox.inner.loop_optimizers import LoopOptimizers


class Loop:
    """A small model with two optimizers, a scheduler and a sampler's position."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.parameters = dict(self.model.named_parameters())
        weights, rest = [self.parameters["0.weight"]], list(self.parameters.values())[1:]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(weights, lr=0.1, momentum=0.9),
            torch.optim.AdamW([{"params": rest[:1]}, {"params": rest[1:], "lr": 0.02}], lr=0.01),
        ]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[1], 0.5)
        self.position = Position()
        objects: dict[str, Any] = {"scheduler": self.scheduler, "position": self.position}
        self.state = LoopOptimizers(self.parameters, self.optimizers, objects)

    def step(self, number: int) -> None:
        """One step, whose data depends on the position."""
        rows = torch.arange(8.0).view(2, 4) + self.position.seen["rows"]
        self.model(rows).square().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()
        self.position.seen["rows"] += 1
        self.position.noise = torch.full((2,), float(number))


class Position:
    """An object with a nested state."""

    def __init__(self) -> None:
        self.seen: dict[Any, Any] = {"rows": 0, 3: [1.5, None, ("a", True)]}
        self.noise = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "noise": self.noise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.noise = state_dict["seen"], state_dict["noise"]


def test_a_loop_goes_on_bit_for_bit() -> None:
    first = Loop()
    for number in range(3):
        first.step(number)
    kept = {name: tensor.clone() for name, tensor in first.state.state().items()}
    weights = copy.deepcopy(first.model.state_dict())
    for number in range(3, 5):
        first.step(number)
    again = Loop()
    again.model.load_state_dict(weights)
    again.state.load(kept)
    assert again.position.seen == {"rows": 3, 3: [1.5, None, ("a", True)]}
    assert [group["lr"] for group in again.optimizers[1].param_groups] == [0.00125, 0.0025]
    for number in range(3, 5):
        again.step(number)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    assert first.state.state().keys() == again.state.state().keys()
    for name, tensor in first.state.state().items():
        assert torch.equal(tensor, again.state.state()[name]), name


def test_what_no_optimizer_trains_is_named() -> None:
    parameters = dict(nn.Linear(2, 2).named_parameters())
    optimizer = torch.optim.SGD([parameters["weight"]], lr=0.1)
    with pytest.raises(ConfigError, match=r"bias is trained by none of the optimizers \(1 such"):
        LoopOptimizers(parameters, [optimizer], {})
    stranger = torch.optim.SGD([*parameters.values(), nn.Parameter(torch.zeros(7))], lr=0.1)
    with pytest.raises(ConfigError, match=r"shape \(7,\) is no trained tensor of the model"):
        LoopOptimizers(parameters, [stranger], {})
    both = torch.optim.SGD(parameters.values(), lr=0.1)
    with pytest.raises(ConfigError, match="weight is in two parameter groups"):
        LoopOptimizers(parameters, [both, optimizer], {})
    with pytest.raises(ConfigError, match="none was given"):
        LoopOptimizers(parameters, [], {})
    with pytest.raises(ConfigError, match="loader has no state_dict"):
        LoopOptimizers(parameters, [both], {"loader": 3})  # type: ignore[dict-item]


def test_a_state_of_another_program_is_refused() -> None:
    loop = Loop()
    loop.step(0)
    kept = loop.state.state()
    for odd in ("momentum_buffer/2.weight", "group/2.0/lr", "object/loader"):
        with pytest.raises(CheckpointError, match=rf"{odd} is of another model, optimizer or"):
            Loop().state.load({**kept, odd: torch.zeros(())})
    with pytest.raises(CheckpointError, match="the checkpoint has none of position"):
        Loop().state.load({n: t for n, t in kept.items() if "position" not in n})


def test_a_state_that_cannot_be_kept_is_named() -> None:
    loop = Loop()
    loop.position.seen = {"rows": {1, 2}}
    with pytest.raises(CheckpointError, match="position holds a set; only numbers"):
        loop.state.state()
    loop = Loop()
    loop.optimizers[0].state[loop.parameters["0.weight"]]["history"] = ["x"]
    with pytest.raises(CheckpointError, match=r"its state history of 0\.weight is a list"):
        loop.state.state()


def test_an_object_whose_state_cannot_be_read_is_named() -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state\nof mine")

        def load_state_dict(self, state: Any) -> None:
            del state

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = LoopOptimizers(dict(model.named_parameters()), [optimizer], {"mine": Broken()})
    with pytest.raises(CheckpointError, match=r"^state: .* of mine failed \(.*: no state\)$"):
        state.state()


def test_a_tensor_that_an_optimizer_got_later_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = LoopOptimizers(dict(model.named_parameters()), [optimizer], {})
    later = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [later]})
    later.sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"shape \(3,\) was added since"):
        state.state()
