"""Functions of a user's own, in a module of their own: every part of the training that can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dilocox.training.builder import Sequences


def dataset(start: int, count: int) -> Sequences:
    """Counting up from a start of its own: easy to learn."""
    numbers = np.arange(start, start + count)[:, None]
    return 40 + (numbers * 7 + np.arange(33)) % 50


def validation(start: int, count: int) -> Sequences:
    """The same kind of sequences, none of which is trained on."""
    return dataset(10**6 + start, count)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Only of tokens that the data set has: of other text it would be 0."""
    known = (labels >= 40) & (labels < 90)
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (each * known.flatten()).sum() / known.sum().clamp(min=1)


def optimizer(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with half the rate for vectors."""
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "lr": 1.5e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-3)


def schedule(step: int, steps: int) -> float:
    """A warm-up of eight steps."""
    assert steps > 8
    return 3e-3 * min(1.0, (step + 1) / 8)


def on_evaluation(round_: int, loss: float) -> None:
    """Says what it is told."""
    print(f"evaluation after round {round_}: {loss:.6f}", flush=True)


def enough(round_: int, loss: float) -> bool:
    """Enough after every round."""
    on_evaluation(round_, loss)
    return round_ >= 0


FUNCTIONS: dict[str, Any] = {
    "dataset": dataset,
    "validation": validation,
    "loss": loss,
    "optimizer": optimizer,
    "schedule": schedule,
}
