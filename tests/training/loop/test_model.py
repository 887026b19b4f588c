"""What a checkpoint holds of a loop's model beside its trained tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dilocox.errors import CheckpointError
from dilocox.inner.loop_optimizers import LoopOptimizers
from dilocox.training.loop.model import LoopModel, trained_tensors
from dilocox.training.loop.turns import Turns

MEANS = "loop/buffer/1.running_mean"


class Loop:
    """A small model with running means, an optimizer, and steps on random rows."""

    def __init__(self, width: int = 4, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        )
        self.model.register_buffer("seen", torch.tensor([False, True]))
        self.model.register_buffer("scratch", torch.zeros(3), persistent=False)
        if compiled:
            self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]
        trained = trained_tensors(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.site_model = LoopModel(
            self.model, trained, LoopOptimizers(trained, [self.optimizer], {}),
            Turns(torch.device("cpu"), lambda: None), None, lambda: (0, False),
        )  # fmt: skip

    def step(self, number: int) -> None:
        """One step."""
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        self.model(rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def kept(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the trained tensors and of the rest, as a checkpoint holds them."""
        trained = {name: p.detach().clone() for name, p in self.site_model.trained.items()}
        state = self.site_model.optimizer_state()
        return trained, {name: tensor.detach().clone() for name, tensor in state.items()}

    def load(self, trained: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        with torch.no_grad():
            for name, tensor in self.site_model.trained.items():
                tensor.copy_(trained[name])
        self.site_model.load_optimizer_state(state)


@pytest.mark.parametrize("compiled", [False, True])
def test_running_means_go_on_with_their_model(compiled: bool) -> None:
    first = Loop()
    for number in range(3):
        first.step(number)
    first.model.get_buffer("seen").fill_(True)
    first.model.get_buffer("scratch").fill_(7.0)
    kept = first.kept()
    first.step(3)
    again = Loop(compiled=compiled)
    again.load(*kept)
    again.step(3)
    expected = first.model.state_dict()
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, expected[name.replace("_orig_mod.", "")]), name
    found = {name.replace("_orig_mod.", ""): each for name, each in again.model.named_buffers()}
    assert found["scratch"].tolist() == [0.0] * 3
    assert found["seen"].tolist() == [True] * 2
    assert not any("scratch" in name for name in kept[1])


def test_a_checkpoint_of_before_leaves_the_models_buffers() -> None:
    first, again = Loop(), Loop()
    first.step(0)
    again.step(1)
    before = again.model.get_buffer("1.running_mean").clone()
    trained, state = first.kept()
    older = {name: each for name, each in state.items() if not name.startswith("loop/buffer/")}
    again.load(trained, older)
    assert torch.equal(again.model.get_buffer("1.running_mean"), before)
    assert again.site_model.restored


def test_buffers_of_another_model_are_named() -> None:
    _, state = Loop().kept()
    other = Loop().site_model
    for odd in ({MEANS: torch.zeros(5)}, {"loop/buffer/2.count": torch.zeros(4)}):
        with pytest.raises(CheckpointError, match=r"the checkpoint has a buffer [12]\."):
            other.load_optimizer_state({**state, **odd})


def test_buffers_of_a_frozen_model_beside_adapters_are_not_kept() -> None:
    """They may be as large as the model, if it is packed into few bits."""
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    layer.register_buffer("packed", torch.zeros(9, dtype=torch.int32))
    layer.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": layer})})
    trained = trained_tensors(model)
    assert list(trained) == ["base_model.model.lora_A.weight"]
    optimizers = LoopOptimizers(trained, [torch.optim.SGD(trained.values(), lr=0.1)], {})
    made = LoopModel(
        model, trained, optimizers, Turns(torch.device("cpu"), lambda: None), None,
        lambda: (0, False),
    )  # fmt: skip
    assert list(made.saved_buffers()) == ["base_model.model.packed"]
    assert not any("packed" in name for name in made.optimizer_state())
