"""Inner steps of a site in a round, computed from its pace by ranks and coordinator alike.

A site's *pace* is its speed in thousandths of the typical site's (`controller.pace`). While the
typical site takes c inner steps, a site of pace p takes (c * p + carry) // 1000 steps. The
remainder of a step is carried into the next round, so over many rounds a site trains exactly in
proportion to its speed. Because the number is rounded down, no site comes late to a boundary. A
site with longer steps comes early, by less than one of its steps.
"""

from __future__ import annotations

FULL = 1000
"""Pace of the typical site."""
MOST = 1000 * FULL
"""The highest pace, and the upper bound of `control.max_speed`."""


def steps_taken(pace: int, carry: int, count: int) -> int:
    """Return a site's inner steps while the typical site takes the first `count` of a round."""
    return (count * pace + carry) // FULL


def carried(pace: int, carry: int, inner_steps: int) -> tuple[int, int]:
    """Return the carry of this round and the carry of the next one, in thousandths of a step.

    `carry` is the remainder from the round before. Every site takes at least one step in a round
    with `inner_steps` > 0: a site that is too slow gets a larger carry, and the others wait for it.
    """
    if inner_steps and not steps_taken(pace, carry, inner_steps):
        carry = FULL - pace * inner_steps
    return carry, (pace * inner_steps + carry) % FULL


def step_within(pace: int, carry: int, number: int) -> int:
    """Return the typical site's inner step of the round in which a site's step `number` ends.

    Both are counted from 0. The result is the step's position in the learning rate schedule.
    """
    return -(-((number + 1) * FULL - carry) // pace) - 1
