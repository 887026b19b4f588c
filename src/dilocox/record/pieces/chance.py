"""How likely it is that withheld pieces escape a sample. Pure."""

from __future__ import annotations


def pass_chance(samples: int, k: int, n: int, share: float = 1.0) -> float:
    """Return an upper bound on the chance that withheld pieces escape all samples.

    A cut that cannot be rebuilt has at most k - 1 of its n pieces. A sample is one piece, drawn
    uniformly and independently from all pieces of all cuts. If a share s of the cuts cannot be
    rebuilt, one sample finds a missing piece with a chance of at least s (n - k + 1) / n, and all
    samples are answered with a chance of at most (1 - s (n - k + 1) / n) ** samples. At rate
    k / n <= 1/2 and s = 1 this is below 2 ** -samples.

    Args:
        samples: Number of samples.
        k: Number of pieces that suffice.
        n: Number of pieces.
        share: Share of the cuts that cannot be rebuilt, from 0 to 1.

    Raises:
        ValueError: A number is out of its range.
    """
    if samples < 0 or not 1 <= k <= n or not 0.0 <= share <= 1.0:
        raise ValueError(f"{samples} samples, {k} of {n} pieces, share {share}")
    # Powers of two stay exact in this form.
    return ((n - share * (n - k + 1)) / n) ** samples
