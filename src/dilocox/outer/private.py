"""Clipping and noise of a site's pseudo-gradient: the Gaussian mechanism, before compression.

Let δ be the pseudo-gradient of one piece at one rank. The site contributes

    δ · min(1, c / |δ|) + N(0, s²)   in each value,

where c is this piece's share of the site's bound C, and s is the noise multiplier times C. The
shares satisfy Σ c² ≤ C² over all pieces, shards and stages. So the Gaussian mechanisms of a round
compose to one with sensitivity C and deviation s, also when later ones depend on earlier ones.
Source: Dong, Roth, Su, "Gaussian differential privacy", JRSS-B 2022, theorem 3.2 and corollary 3.3.
Clipping of every part by itself: McMahan et al., "Learning differentially private recurrent
language models", ICLR 2018, section 2.3.

Residual, compression, exchange and outer step only see the noised value. They are functions of the
noised value, so they reveal nothing more (post-processing).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from dilocox.config.run_config import RunConfig
from dilocox.outer.layout import Layout
from dilocox.utils.cache_blocks import blocks

PIECE = 1 << 20
"""Values that are drawn with one key; even."""
_MARGIN = 1.0 - 2.0**-20
"""Factor that keeps the clipped norm below the bound, although fp32 products are rounded."""


@dataclass(frozen=True)
class ContributionPrivacy:
    """Bound and noise of one piece at one rank."""

    bound: float
    """c: largest L2 norm of the piece's pseudo-gradient."""
    deviation: float
    """s: standard deviation of the noise on each value. 0: no noise."""
    random: Callable[[int], bytes] = os.urandom
    """Returns secret random bytes; tests replace it."""

    def apply(self, delta: Tensor, layout: Layout) -> None:
        """Clip `delta`, flat fp32 [layout.length], in place, then add noise to its tensors.

        All values must be finite. The gaps between tensors stay zero.
        """
        clip(delta, self.bound)
        if self.deviation:
            for view in layout.views(delta).values():
                add_noise(view.view(-1), self.deviation, self.random)


def privacy_of(
    config: RunConfig, site: str, layout: Layout, stage_values: int
) -> ContributionPrivacy | None:
    """Return bound and noise of a piece at `site`. None if the site does not use `[privacy]`.

    Args:
        config: the run file.
        site: name of the site.
        layout: the piece at this rank.
        stage_values: number of values of the piece's stage, over all shards and pieces.
    """
    if site not in config.private_sites:
        return None
    section = config.privacy
    values = sum(map(math.prod, layout.shapes))
    bound = share_of_bound(section.clip, values, stage_values, config.site.stages)
    return ContributionPrivacy(bound, section.noise * section.clip)


def share_of_bound(clip: float, values: int, stage_values: int, stages: int) -> float:
    """Return c of a piece with `values` of the `stage_values` values of its stage.

    The squares of all shares add up to `clip`² at most. A stage counts all shards.
    """
    return 0.0 if not values else clip * math.sqrt(values / (stage_values * stages))


def clip(delta: Tensor, bound: float) -> None:
    """Scale `delta`, flat fp32 with finite values, in place to an L2 norm of at most `bound`."""
    squares = sum(float(delta[at].double().square().sum()) for at in blocks(delta))
    norm = math.sqrt(squares)
    if norm > bound * _MARGIN:
        # In float64: a small bound over a large norm may have no fp32 value.
        factor = bound / norm * _MARGIN
        for at in blocks(delta):
            delta[at] = (delta[at].double() * factor).float()


def add_noise(values: Tensor, deviation: float, random: Callable[[int], bytes]) -> None:
    """Add Gaussian noise to `values`, flat fp32, in place. The sum is rounded once."""
    for start in range(0, values.numel(), PIECE):
        part = values[start : start + PIECE]
        drawn = gaussian(part.numel(), random).to(part.device)
        part.copy_((part.double() + drawn * deviation).float())


def gaussian(count: int, random: Callable[[int], bytes] = os.urandom) -> Tensor:
    """Return standard Gaussian values, float64 [count], that nobody can predict.

    ChaCha20 (RFC 8439) with a fresh key of `random` gives 64 bits per value, and Box and Muller's
    transform (1958) makes Gaussian values of them. `count` is at most `PIECE`.
    """
    pairs = -(-count // 2)
    stream = Cipher(algorithms.ChaCha20(random(32), bytes(16)), mode=None).encryptor()
    bits = np.frombuffer(stream.update(bytes(16 * pairs)), dtype="<u8")
    # In (0, 1]: the smallest value is 2⁻⁶⁴, so radii reach 9.4.
    uniform = torch.from_numpy((bits.astype(np.float64) + 1.0) * 2.0**-64).view(2, pairs)
    radius = uniform[0].log().mul_(-2.0).sqrt_()
    angle = uniform[1] * (2.0 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
