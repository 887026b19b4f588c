"""Overlap rules: where a site goes on from when an averaged pseudo-gradient lands.

The anchor takes the outer step under every rule, and is the same at all sites. A rule only says
which parameters the site itself trains on from there. With θ the anchor after the step and d the
displacement (sum of inner updates) since the fragment's last boundary:

- `none`, `naive`: x = θ. With `none` d is zero, because nothing was trained since the boundary.
- `keep`: x = θ + κ·d. Fresh progress stays, damped by κ.
- `eager` (arXiv 2502.12996): the site knows its own next pseudo-gradient δ_t = −d already, while
  the Δ that lands holds its last one, δ_{t−1}, with the share s = w_i / Σw. It looks at what the
  same outer step would give had its own part been up to date: Δ' = Δ + s·(δ_t − δ_{t−1}). With m
  the momentum and θ_0 the anchor before the step, θ(Δ) = θ_0 − γ·(Δ + μ·(μ·m + Δ)), so a change
  of Δ enters with −γ·(1 + μ): x = θ + γ·(1 + μ)·s·(d + δ_{t−1}). Nothing of it enters anchor or
  momentum. A site whose contribution was left out has s = 0: x = θ.

A rule moves x by a jump, and a jump is no displacement: what d counts is the same before and
after, so all of d, undamped, is in the next pseudo-gradient (see `FragmentState.land`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dilocox.errors import TrainingError
from dilocox.outer.optimizer import gain


@dataclass(frozen=True)
class Rule:
    """How one exchange lands: the plan of its round, and this site's share in its average."""

    overlap: Literal["none", "naive", "keep", "eager"]
    learning_rate: float
    """gamma, the outer learning rate."""
    momentum: float
    """mu, the outer momentum."""
    keep: float = 1.0
    """kappa; counts with overlap `keep` only."""
    share: float = 0.0
    """w_i over the sum of w of the contribution set, 0 if this site is not in it; counts with
    `eager` only."""


def local_view(rule: Rule, anchor: Tensor, displacement: Tensor, previous: Tensor | None) -> Tensor:
    """Where the site goes on from: a new flat fp32 tensor like `anchor`, which stays as it is.

    `anchor` is θ after the step, `displacement` is d, `previous` is δ_{t−1}, this site's
    pseudo-gradient in the average that lands. Raises `TrainingError` if `eager` lacks it.
    """
    if rule.overlap == "keep":
        return displacement.mul(rule.keep).add_(anchor)
    if rule.overlap == "eager" and rule.share:
        if previous is None:
            raise TrainingError(
                'overlap "eager" needs the last pseudo-gradient, which was not kept: make the '
                "fragment's state with eager=True"
            )
        fresh = displacement.add(previous)
        return fresh.mul_(gain(rule.learning_rate, rule.momentum) * rule.share).add_(anchor)
    return anchor.clone()
