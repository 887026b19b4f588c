"""The model of a user's loop, with the methods of a rank's model that training calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dilocox.compression.second_moments import SecondMoments
from dilocox.errors import CheckpointError, ConfigError, TrainingError
from dilocox.inner import mean_cross_entropy
from dilocox.inner.counted import CountedLabels
from dilocox.inner.fsdp import drop_gathered, local
from dilocox.inner.loop_optimizers import LoopOptimizers
from dilocox.inner.site_model import ExchangeGradients
from dilocox.inner.step_result import StepResult
from dilocox.models.adapter import PREFIX, is_adapter, stored_name
from dilocox.training.loop.turns import StepWork, Turns

_BUFFER = "loop/buffer/"
"""Begins the names of buffers among the state of the optimizers."""

Evaluation = Callable[..., "Tensor | float"]
"""(model, inputs int64 [b, L], labels int64 [b, L]) -> mean loss over labels of 0 or above.

In a run without text (`data.own`): (model) -> mean loss over held-out data of the loop's own.
"""


def usual_evaluation(model: nn.Module, inputs: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
    """Return the mean cross-entropy of a model that returns logits, alone or as `.logits`.

    Raises `ConfigError` for any other output.
    """
    found = model(inputs, **more)
    logits = getattr(found, "logits", found)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        raise ConfigError(
            "evaluation: the model does not return logits [b, L, V] of tokens [b, L]; give "
            "dilocox.site a function: evaluation(model, inputs, labels) returns the mean loss"
        )
    return mean_cross_entropy(logits, labels)


def trained_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the tensors of `model` that are trained, by name, in the model's order.

    The prefix of a model that `torch.compile` wraps is left out. Adapters of a PEFT model have the
    names of PEFT's files.
    """
    return {
        _full_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _full_name(name: str) -> str:
    name = name.replace("_orig_mod.", "")
    inner = name.removeprefix(PREFIX)
    return stored_name(inner) if is_adapter(name) and is_adapter(stored_name(inner)) else name


class LoopModel:
    """Has the user's loop take each inner step, and evaluates the user's model.

    Args:
        model: the user's model.
        trained: its trained tensors by name, fp32.
        optimizers: the loop's optimizers.
        turns: passes steps to the user's thread.
        evaluation: computes the held-out loss.
        due: returns the number of the step that is due, and whether it is its round's last one.
        mean: returns the mean of a loss over the processes that divide the model. It gets this
            process's loss, and the number of labels of which that is the mean.
        own_text: whether `evaluation` reads held-out data of its own.
    """

    whole_gradients = False

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        optimizers: LoopOptimizers,
        turns: Turns,
        evaluation: Evaluation | None,
        due: Callable[[], tuple[int, bool]],
        mean: Callable[[float, int], float] = lambda loss, _: loss,
        own_text: bool = False,
    ) -> None:
        self._own_text = own_text
        self._model, self._optimizers, self._mean = model, optimizers, mean
        self._turns, self._evaluation, self._due = turns, evaluation, due
        self.trained = dict(trained)
        """The trained tensors by name."""
        self._form = {name: _form_of(parameter) for name, parameter in trained.items()}
        self.before_update: Callable[[], None] = lambda: None
        self.restored = False
        """Whether a checkpoint has restored the state of the optimizers."""

    def inner_step(
        self,
        _input_ids: Tensor,
        _labels: Tensor,
        learning_rate: float,
        _exchange_gradients: ExchangeGradients | None = None,
        _counted: CountedLabels | None = None,
    ) -> StepResult:
        """Have the user's loop take a step. The loop reads its batch by itself.

        Raises `LoopLeftError` if the loop has ended, and `TrainingError` if the model has other
        trained tensors than at the start.
        """
        self.before_update()
        step, last = self._due()
        return self._turns.step(StepWork(step, learning_rate, last))

    def check(self) -> None:
        """Raise `TrainingError` if trained tensors were replaced, added, frozen or converted."""
        now = trained_tensors(self._model)
        odd = next(iter(now.keys() ^ self.trained.keys()), None)
        why = "was added or unfrozen since" if odd in now else "was removed or frozen since"
        if odd is None:
            odd = next((n for n, p in now.items() if p is not self.trained[n]), None)
            why = "is another object than when"
        if odd is None:
            odd = next((n for n, p in now.items() if _form_of(p) != self._form[n]), None)
            why = "has another shape, dtype, device or memory than when"
        if odd is not None:
            raise TrainingError(
                f"model: {odd} {why} the site began; build the model, and move or freeze "
                "its parts, before dilocox.site"
            )

    def evaluate(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> float:
        """Return the mean loss over the rows, in the user's thread and without gradients.

        All processes that divide the model call this with their own rows. The loss is 0 if no
        label of any process counts.
        """
        count = 1 if self._own_text else int((labels >= 0).sum())

        def loss() -> float:
            # Every process computes its part, since FSDP2 gathers tensors from all of them. A mean
            # over no label is NaN.
            own = self._loss(input_ids, labels, counted)
            found = self._mean(own if count else 0.0, count)
            drop_gathered(self._model)
            return found

        return float(self._turns.call(loss))

    def _loss(self, inputs: Tensor, labels: Tensor, counted: CountedLabels | None) -> float:
        device = next(iter(self.trained.values())).device
        modes = [(each, each.training) for each in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                if self._own_text:
                    assert self._evaluation is not None
                    return float(self._evaluation(self._model))
                inputs, labels = inputs.to(device), labels.to(device)
                if self._evaluation is not None:
                    return float(self._evaluation(self._model, inputs, labels))
                more: dict[str, Any] = {}
                if counted is not None and counted.positions is not None:
                    more["position_ids"] = counted.positions.to(device)
                return float(usual_evaluation(self._model, inputs, labels, **more))
        finally:
            for module, training in modes:
                module.training = training

    def compile_problem(self) -> None:
        """Return None: the loop compiles its model by itself."""

    def loss_and_gradients(
        self,
        _input_ids: Tensor,
        _labels: Tensor,
        _names: Sequence[str],
        _counted: CountedLabels | None = None,
    ) -> tuple[float, dict[str, Tensor]]:
        """Raise `ConfigError`: no gate works with a loop of the user's own."""
        raise ConfigError(NO_GATE)

    def loss_beside(
        self, _input_ids: Tensor, _labels: Tensor, _counted: CountedLabels | None = None
    ) -> Callable[[Mapping[str, Tensor]], float]:
        """Raise `ConfigError`: no gate works with a loop of the user's own."""
        raise ConfigError(NO_GATE)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the live state of the loop's optimizers, of further objects, and of buffers.

        Buffers are the model's persistent ones, such as running means. Those beside adapters are
        left out: they are of the frozen model, and may be as large as that.
        """
        found = self._optimizers.state()
        if not any(map(is_adapter, self.trained)):
            kept = self._persistent_buffers().items()
            found |= {f"{_BUFFER}{name}": local(buffer) for name, buffer in kept}
        return found

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of the loop's optimizers, of further objects, and of buffers.

        A checkpoint of an earlier version has no buffers: the model then keeps its own. Raises
        `CheckpointError` for a state of another loop or model.
        """
        self.restored = True
        rest, own = dict(state), self._persistent_buffers()
        for full in [name for name in rest if name.startswith(_BUFFER)]:
            name, kept = full.removeprefix(_BUFFER), rest.pop(full)
            buffer = local(own[name]) if name in own else None
            if buffer is None or (buffer.shape, buffer.dtype) != (kept.shape, kept.dtype):
                raise CheckpointError(
                    f"model: the checkpoint has a buffer {name} of shape {tuple(kept.shape)}, "
                    f"{str(kept.dtype).removeprefix('torch.')}, and the model has not; start the "
                    "site with the program that wrote the checkpoint"
                )
            buffer.copy_(kept)
        self._optimizers.load(rest)

    def _persistent_buffers(self) -> dict[str, Tensor]:
        """Return the model's live persistent buffers by name."""
        kept = self._model.state_dict()
        return {
            name.replace("_orig_mod.", ""): buffer
            for name, buffer in self._model.named_buffers()
            if name in kept
        }

    def second_moments(self) -> SecondMoments:
        """Return no second moments: only those of dilocox's own optimizers are exchanged."""
        return SecondMoments({}, torch.ones(()), {})

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the model's persistent buffers by name; floating-point ones in fp32."""
        return {
            name: b.detach().float() if b.is_floating_point() else b
            for name, b in self._persistent_buffers().items()
        }

    def sync_tied(self, moments: bool = False) -> None:
        """Do nothing: a tied tensor is one parameter of the whole model."""

    def lead(self) -> None:
        """Do nothing: the site has one rank."""

    def follow(self, step_done: Callable[[], None]) -> None:
        """Do nothing: the site has one rank."""

    def let_go(self) -> None:
        """Do nothing: the site has one rank."""


NO_GATE = (
    "admission.gate: needs dilocox's own loop, which computes the loss of a second copy of the "
    "model; set admission.gate = false"
)


def _form_of(parameter: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, int]:
    return parameter.shape, parameter.dtype, parameter.device, local(parameter).data_ptr()
