"""`adapt = "effective-rank"`: AdaGradCmp (arXiv 2506.21263), in the form of docs/algorithm.md §4.

Rank and inner steps follow the effective rank of the averaged pseudo-gradient. While fewer than c
rounds have been measured, they are r_1 and H_1 of the run file. Then r is the mean of the last c
measurements, and H = alpha * H_1 with alpha = r / r_1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.choice import Choice, as_the_run_file_says


def mean_rank_milli(sites: Sequence[int]) -> int:
    """Return the mean effective rank of a round over its sites, in thousandths, rounded."""
    return (2 * sum(sites) + len(sites)) // (2 * len(sites))


def settled_rank_milli(sites: Sequence[int]) -> int:
    """Return the effective rank of a round from the sites' claims, in thousandths.

    All sites measure the same average. Of three or more sites the lower median counts, so that one
    false claim has no effect; of fewer the mean.
    """
    return median_low(sites) if len(sites) > 2 else mean_rank_milli(sites)


def choose(config: RunConfig, ranks_milli: Sequence[int]) -> Choice:
    """Return the settings after rounds with these effective ranks, in thousandths, oldest first."""
    window, fixed = config.control.window, as_the_run_file_says(config)
    spec = parse_spec(fixed.codec)
    if len(ranks_milli) < window:
        return replace(fixed, reason=f"warm-up: {len(ranks_milli)} of {window} rounds measured")
    total = sum(ranks_milli[-window:])
    # Rounded to the nearest whole number; ties up.
    rank = max(1, min(spec.number, (2 * total + 1000 * window) // (2000 * window)))
    slot = fixed.inner_steps // fixed.slots
    slots = max(1, min(fixed.slots, (2 * rank * fixed.slots + spec.number) // (2 * spec.number)))
    if fixed.slots == 1:
        slot = max(1, (2 * rank * fixed.inner_steps + spec.number) // (2 * spec.number))
    delay = slots if config.outer.overlap in ("naive", "eager") else min(fixed.delay, slots)
    return replace(
        fixed,
        inner_steps=slots * slot,
        slots=slots,
        delay=delay,
        codec=replace(spec, number=rank).text,
        reason=f"effective rank {total / window / 1000:.1f} over the last {window} rounds, "
        f"{rank / spec.number:.0%} of rank {spec.number}",
    )
