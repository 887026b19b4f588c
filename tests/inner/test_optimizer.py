"""The inner optimizer against the formulas, and what its state refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dilocox.config.site import InnerSection
from dilocox.errors import CheckpointError
from dilocox.inner.optimizer import InnerOptimizer

pytestmark = pytest.mark.waits


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "vector": (5,), "empty": (0, 4)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def give_gradients(held: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    for parameter in held.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return {name: p.grad.clone() for name, p in held.items() if p.grad is not None}


def test_adamw_decays_matrices_only_and_divides_gradients() -> None:
    inner = InnerSection(weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    held = parameters()
    optimizer = InnerOptimizer(held, inner)
    wanted = {name: p.detach().clone().double() for name, p in held.items()}
    first = {name: torch.zeros_like(value) for name, value in wanted.items()}
    second = {name: torch.zeros_like(value) for name, value in wanted.items()}
    for step in range(3):
        rate, divisor = 0.1 / (step + 1), 2.0 + step
        for name, gradient in give_gradients(held, step).items():
            scaled = gradient.double() / divisor
            first[name] = 0.8 * first[name] + 0.2 * scaled
            second[name] = 0.9 * second[name] + 0.1 * scaled**2
            if wanted[name].dim() > 1:
                wanted[name] *= 1 - rate * 0.3
            update = first[name] / (1 - 0.8 ** (step + 1))
            spread = (second[name] / (1 - 0.9 ** (step + 1))).sqrt() + 1e-6
            wanted[name] -= rate * update / spread
        optimizer.step(rate, torch.tensor(divisor), torch.tensor(0.0))
    for name, parameter in held.items():
        torch.testing.assert_close(parameter.detach().double(), wanted[name], rtol=1e-5, atol=1e-6)
    moments, weights = optimizer.second_moments()
    assert moments.keys() == {"matrix", "vector"}
    for name, moment in moments.items():
        torch.testing.assert_close(moment.double(), second[name], rtol=1e-5, atol=1e-9)
        assert moment.data_ptr() == optimizer.state()[f"exp_avg_sq/{name}"].data_ptr()
    assert float(weights) == pytest.approx(1 - 0.9**3, rel=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_skipped_step_changes_nothing(kind: str) -> None:
    held = parameters()
    optimizer = InnerOptimizer(held, InnerSection(optimizer=kind))  # type: ignore[arg-type]
    before = {name: p.detach().clone() for name, p in held.items()}
    give_gradients(held, 0)
    optimizer.step(0.1, torch.tensor(1.0), torch.tensor(1.0))
    assert all(torch.equal(p.detach(), before[name]) for name, p in held.items())
    assert not any(tensor.any() for tensor in optimizer.state().values())


@pytest.mark.parametrize(("kind", "held"), [("sgd", set()), ("muon", {"vector"})])
def test_only_adamws_tensors_have_second_moments(kind: str, held: set[str]) -> None:
    shapes = {"model.layers.0.mlp.up_proj.weight": (3, 4), "vector": (5,)}
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = InnerOptimizer(parameters, InnerSection(optimizer=kind))  # type: ignore[arg-type]
    assert optimizer.second_moments()[0].keys() == held


def test_sgd_is_plain() -> None:
    held = parameters()
    optimizer = InnerOptimizer(held, InnerSection(optimizer="sgd", weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in held.items()}
    gradients = give_gradients(held, 0)
    optimizer.step(0.25, torch.tensor(2.0), torch.tensor(0.0))
    for name, parameter in held.items():
        torch.testing.assert_close(parameter.detach(), before[name] - 0.125 * gradients[name])
    assert optimizer.state() == {}


def test_state_of_another_model_is_refused() -> None:
    optimizer = InnerOptimizer(parameters(), InnerSection())
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert state["exp_avg/empty"].shape == (0, 4)
    with pytest.raises(CheckpointError, match="exp_avg/matrix has shape"):
        optimizer.load({**state, "exp_avg/matrix": torch.zeros(4, 4)})
    del state["exp_avg_sq/vector"]
    with pytest.raises(CheckpointError, match="exp_avg_sq/vector is missing or unexpected"):
        optimizer.load(state)
