"""The outer step, and the parameters from which a site continues after it.

`nesterov_step` moves the anchor by the averaged pseudo-gradient: SGD with Nesterov momentum.

Under every overlap rule the anchor takes the outer step and is equal at all sites. The rule only
sets the site's own parameters x. Let θ be the anchor after the step, and d the displacement (sum of
inner updates) since the fragment's last boundary:

- `none`, `naive`: x = θ. With `none`, d is zero, because the site waits from boundary to landing.
- `keep`: x = θ + κ·d. Fresh progress stays, damped by κ.
- `eager` (arXiv 2502.12996): when Δ_{t−1} lands, the site already knows its own part s·δ_t of the
  next average Δ_t. Here δ_t = −d, and s = w_i / Σw is the site's share. The site continues from
  the point to which the next outer step would lead if Δ_t were this part alone:
  x = θ − γ·(s·δ_t + μ·(μ·m_i + s·δ_t)).
  m_i is the site's own part of the momentum: m_i = μ·m_i + s·δ_{t−1} at every outer step, so the
  sum of all m_i is m. This step changes neither the anchor nor the momentum m.

  The paper writes the rule otherwise, with the same result. There every site keeps a view of its
  own, and applies to the view the outer step of Δ_{t−1} + s·(δ_t − δ_{t−1}). The view already holds
  the site's part of δ_{t−1}, which the fresh δ_t replaces. The outer step is linear, so these
  differences add up over the rounds to the distance x − θ given above.

  Applying that outer step to the *anchor* would be wrong. The anchor holds no such parts of earlier
  rounds, so δ_{t−1} would be subtracted although it was never added. With one site, γ = 1 and
  μ = 0, x would be θ_0 + d_0 + d_2 after three rounds instead of θ_0 + d_0 + d_1 + d_2. With strong
  momentum such a rule diverges (docs/notes/overlap.md).

Under every rule a site may keep a share λ of its residual e in x. The rule then subtracts λ·e/w_i
from x, because e has the sign and the scale of contributions. Codecs that send few values leave
most of the learned change in the residual; without λ the site would train on without that change
(docs/notes/quality.md).

A rule moves x by a jump. A jump is not a displacement: d is the same before and after, so the next
pseudo-gradient contains all of d, undamped (see `FragmentState.land`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dilocox.errors import TrainingError
from dilocox.utils.rounding import round_to_bf16

MOMENTUM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes that the outer momentum may have, by their names in run files and records."""


def nesterov_step(
    anchor: Tensor, momentum: Tensor, average: Tensor, learning_rate: float, momentum_factor: float
) -> None:
    """Take one outer step in place: m = μ·m + Δ, then θ = θ − γ·(Δ + μ·m).

    This is DiLoCo's outer step (arXiv 2311.08105), in the form of PyTorch's SGD with `nesterov`.
    Products and sums are separate operations, and each rounds once, so the anchor has the same bits
    at every site on any processor.

    Args:
        anchor: θ, flat fp32; changed in place.
        momentum: m, flat fp32 or bf16, on the same device; changed in place. A bf16 momentum is
            rounded once, after the step; the step itself uses the unrounded m.
        average: Δ, flat fp32, unchanged.
        learning_rate: γ.
        momentum_factor: μ.
    """
    kept = momentum.dtype == torch.float32
    total = momentum if kept else momentum.float()
    total.mul_(momentum_factor).add_(average)
    step = total * momentum_factor
    step.add_(average).mul_(learning_rate)
    anchor.sub_(step)
    if not kept:
        momentum.copy_(as_kept(total, momentum.dtype))


def as_kept(momentum: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an outer momentum (flat fp32) in `dtype`: itself for fp32, rounded for bf16."""
    return momentum if dtype == torch.float32 else round_to_bf16(momentum)


@dataclass(frozen=True)
class Rule:
    """How one exchange lands: rates of its round's plan, and this site's share of its average."""

    overlap: Literal["none", "naive", "keep", "eager"]
    learning_rate: float
    """gamma, the outer learning rate."""
    momentum: float
    """mu, the outer momentum."""
    keep: float = 1.0
    """kappa; used by overlap `keep` only."""
    share: float = 0.0
    """w_i over the sum of w of the contribution set; 0 if this site is not in the set. Used by
    overlap `eager` only."""
    residual: float = 0.0
    """lambda / w_i. The division is needed because the residual has the scale of contributions,
    which are multiplied by w_i."""


def local_view(
    rule: Rule,
    anchor: Tensor,
    displacement: Tensor,
    own: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the parameters x from which the site continues, as a new flat fp32 tensor.

    Args:
        rule: the overlap rule and its rates.
        anchor: θ after the step; unchanged.
        displacement: d.
        own: m_i after the step. May be None under every rule but `eager`.
        residual: e. None without error feedback.

    Raises `TrainingError` if rule `eager` gets no `own`.
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
