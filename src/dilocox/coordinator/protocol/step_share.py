"""A site's inner steps of a round, from its pace: what ranks and coordinator compute alike.

A site's *pace* is its speed in thousandths of the typical site's (`controller.pace`). While the
typical site takes c inner steps, a site of pace p takes (c * p + carry) // 1000: what is left of a
step is carried into the next round. Over many rounds a site trains exactly in proportion to its
speed. Rounding down means that no site comes late to a boundary because of it; one with longer
steps comes early, by less than a step.
"""

from __future__ import annotations

FULL = 1000
"""Pace of the typical site."""
MOST = 1000 * FULL
"""The highest pace: what `control.max_speed` may be."""


def steps_taken(pace: int, carry: int, count: int) -> int:
    """Inner steps of a site while the typical one takes `count` from the round's beginning."""
    return (count * pace + carry) // FULL


def carried(pace: int, carry: int, inner_steps: int) -> tuple[int, int]:
    """(carry of this round, of the next), `carry` being what the round before has left.

    Every site takes at least one step in a round of `inner_steps`; one that is too slow for that
    is waited for.
    """
    if inner_steps and not steps_taken(pace, carry, inner_steps):
        carry = FULL - pace * inner_steps
    return carry, (pace * inner_steps + carry) % FULL


def step_within(pace: int, carry: int, number: int) -> int:
    """Which of the typical site's inner steps of the round, from 0, a site's step `number`, from 0,
    ends with: its place in the schedule of the learning rate."""
    return -(-((number + 1) * FULL - carry) // pace) - 1
