"""The calls of a rank's model that training makes, whoever computes the inner steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from dilocox.compression.second_moments import SecondMoments
from dilocox.inner.counted import CountedLabels
from dilocox.inner.site_model import ExchangeGradients
from dilocox.inner.step_result import StepResult


class RankModel(Protocol):
    """One rank's part of a site's model: a `SiteModel`, or the model of a user's loop.

    Each method does what the method of `SiteModel` with the same name does.
    """

    before_update: Callable[[], None]
    whole_gradients: bool

    def inner_step(
        self,
        input_ids: Tensor,
        labels: Tensor,
        learning_rate: float,
        exchange_gradients: ExchangeGradients | None = None,
        counted: CountedLabels | None = None,
    ) -> StepResult:
        """Take one optimizer step."""

    def compile_problem(self) -> str | None:
        """Return, once, why layers run without being compiled."""

    def evaluate(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> float:
        """Return the mean loss, by forward passes alone."""

    def loss_and_gradients(
        self,
        input_ids: Tensor,
        labels: Tensor,
        names: Sequence[str],
        counted: CountedLabels | None = None,
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss and its gradients. Trains nothing."""

    def loss_beside(
        self, input_ids: Tensor, labels: Tensor, counted: CountedLabels | None = None
    ) -> Callable[[Mapping[str, Tensor]], float]:
        """Return a function from tensors by full name to the mean loss over these rows."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the live state of the inner optimizer."""

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the inner optimizer's state."""

    def second_moments(self) -> SecondMoments:
        """Return the inner optimizer's second moments."""

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint of the model holds."""

    def sync_tied(self, moments: bool = False) -> None:
        """Set the copy of a tied tensor from its owner."""

    def lead(self) -> None:
        """Let further replicas repeat every call."""

    def follow(self, step_done: Callable[[], None]) -> None:
        """Follow the first replica's calls."""

    def let_go(self) -> None:
        """Order further replicas to end."""
