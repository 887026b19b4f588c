"""Overlap rules: where a site goes on from when an averaged pseudo-gradient lands.

The anchor takes the outer step under every rule, and is the same at all sites. A rule only says
which parameters the site itself trains on from there. With θ the anchor after the step and d the
displacement (sum of inner updates) since the fragment's last boundary:

- `none`, `naive`: x = θ. With `none` d is zero, because nothing was trained since the boundary.
- `keep`: x = θ + κ·d. Fresh progress stays, damped by κ.
- `eager` (arXiv 2502.12996): when Δ_{t−1} lands, the site knows its own part of Δ_t already: s·δ_t
  with δ_t = −d and its share s = w_i / Σw. It goes on from where the next outer step would lead if
  that part were all of it: with m_i the site's own part of the momentum (m_i = μ·m_i + s·δ_{t−1} at
  every outer step, so that the sum of all m_i is m),
  x = θ − γ·(s·δ_t + μ·(μ·m_i + s·δ_t)).
  In the paper every site applies to its own view the outer step of Δ_{t−1} + s·(δ_t − δ_{t−1}):
  its old part is exchanged for the fresh one. The outer step is linear and the differences add
  up over the rounds, to exactly this distance from the anchor. One such step from the *anchor*,
  which does not hold the eager parts of earlier rounds, would take δ_{t−1} away without having
  given it: with one site, γ = 1 and μ = 0, x would be θ_0 + d_0 + d_2 after three rounds instead of
  θ_0 + d_0 + d_1 + d_2, and strong momentum then diverges. Nothing of it enters anchor or momentum.

Under every rule a site may keep a share λ of its residual e in x: x is then less by λ·e/w_i, for e
is of the sign and scale of contributions. With codecs that send few values most of what a site has
learned waits in its residual, and the site would go on as if it had not learned it
(docs/notes/quality.md).

A rule moves x by a jump, and a jump is no displacement: what d counts is the same before and
after, so all of d, undamped, is in the next pseudo-gradient (see `FragmentState.land`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dilocox.errors import TrainingError
from dilocox.outer.optimizer import nesterov_step


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
    residual: float = 0.0
    """lambda / w_i: the residual is of the scale of contributions, which are weighted."""


def local_view(
    rule: Rule,
    anchor: Tensor,
    displacement: Tensor,
    own: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Where the site goes on from: a new flat fp32 tensor like `anchor`, which stays as it is.

    `anchor` is θ after the step, `displacement` is d, `own` is m_i, the site's part of the momentum
    after the step, `residual` is e, if the site has one. Raises `TrainingError` if `eager` lacks
    `own`.
    """
    view = _by_rule(rule, anchor, displacement, own)
    if rule.residual and residual is not None:
        view.sub_(residual.mul(rule.residual))
    return view


def _by_rule(rule: Rule, anchor: Tensor, displacement: Tensor, own: Tensor | None) -> Tensor:
    if rule.overlap == "keep":
        return displacement.mul(rule.keep).add_(anchor)
    view = anchor.clone()
    if rule.overlap == "eager":
        if own is None:
            raise TrainingError(
                'overlap "eager" needs the site\'s own part of the outer momentum, which was not '
                "kept: make the fragment's state with eager=True"
            )
        fresh = displacement.mul(-rule.share)
        nesterov_step(view, own.clone(), fresh, rule.learning_rate, rule.momentum)
    return view
