"""How many inner steps each site takes, from how fast it is; and what its contribution weighs.

A site's *pace* is its speed in thousandths of the typical site's; `step_share` says which inner
steps follow from that.

The typical site is the fastest one where the run file declares speeds. A speed that is measured is
a site's own word. So of three sites or more the typical one is the middle one, of an even number
the faster of the two: a minority that claims to be fast takes no steps from the others, and is
given more itself. Of two sites the typical one is the faster: neither is a majority.

Pure functions of whole numbers: times are microseconds, as sites measured them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dilocox.coordinator.protocol.step_share import FULL

ALIKE = 950
"""From this pace on, and up to its reciprocal, a site counts as equally fast: machines of one kind
differ by a few per cent from round to round."""
GRAIN = 10
"""Measured paces are rounded down to multiples of this."""
SLOWER, FASTER = 20, 50
"""A pace in force is kept while what is measured lies less than so many thousandths of it below,
or above."""
ROUNDS = 3
"""A site's step time is the median of so many rounds at least, so that one that was disturbed by a
checkpoint, say, changes nothing. A site that has measured fewer is given no more steps than the
typical one."""
RISE = 1500
"""A pace above `FULL` rises to at most so many thousandths of itself from one round to the next: a
site whose claim is false comes late to its exchanges before the others have waited long."""
MAJORITY = 3
"""Of so many sites two are a majority."""
PERIOD_US = 60_000_000
"""It is the median of all rounds of this time, where rounds are short: a machine that is busy for
some seconds is not a slow one, and whoever is paced by such seconds idles in the next ones."""
MOST_ROUNDS = 40
"""Of so many rounds at most."""
SURE, UNSURE = 8, 750
"""Until a site has measured so many rounds, or all that are looked at, only a pace below this
counts as slower, or above its reciprocal as faster; one that is in force is measured as usual."""


def rounds_looked_at(inner_steps: int, step_us: int) -> int:
    """How many of the latest rounds paces are made from, where a round has so many inner steps of
    the typical site, of `step_us` microseconds each."""
    return min(MOST_ROUNDS, max(ROUNDS, PERIOD_US // max(1, inner_steps * step_us)))


def measured_paces(
    step_us: Mapping[str, Sequence[int]],
    before: Mapping[str, int],
    rounds: int = ROUNDS,
    most: float = math.inf,
) -> dict[str, int]:
    """Pace of every site of `step_us`: its step times of the latest rounds, of which `rounds` are
    looked at.

    `before`: paces in force, if there are any. A site without step times keeps its own, or counts
    as a typical one. One of fewer than `ROUNDS` rounds, which has just come, is not what the others
    are measured by, unless too few others are there, and has no pace above `FULL`. A site counts as
    at most `most` times as fast as the median of the others, and as the typical one. What is above
    `FULL` comes step by step (`RISE`).
    """
    own = {site: middle(times[-rounds:]) for site, times in step_us.items() if times}
    bounded = {site: max(time, _least(site, own, most)) for site, time in own.items()}
    known = [time for site, time in bounded.items() if len(step_us[site]) >= ROUNDS]
    enough = known and (len(known) >= MAJORITY or len(bounded) < MAJORITY)
    typical = middle(known if enough else list(bounded.values())) if bounded else 0
    found = {}
    for site in step_us:
        old = before.get(site, FULL)
        found[site] = old
        if site in own:
            new = int(min(FULL * typical // max(1, bounded[site]), FULL * most))
            new = min(new, max(FULL, old) * RISE // FULL)
            if len(step_us[site]) < ROUNDS:
                new = min(new, FULL)
            sure = old != FULL or len(step_us[site]) >= min(SURE, rounds)
            alike = ALIKE if sure else UNSURE
            equal = alike <= new <= FULL * FULL // alike
            new = FULL if equal else max(GRAIN, new // GRAIN * GRAIN)
            near = old * (FULL - SLOWER) <= new * FULL <= old * (FULL + FASTER)
            found[site] = old if near and not equal else new
    return found


def _least(site: str, own: Mapping[str, int], most: float) -> int:
    """The shortest step time that a site is believed, by the others' median; 0 without others."""
    others = [time for other, time in own.items() if other != site]
    return int(middle(others) / most) if others else 0


def declared_paces(speeds: Mapping[str, float]) -> dict[str, int]:
    """Pace of every site from speeds in any unit, in thousandths of the fastest one's."""
    fastest = max(speeds.values())
    return {site: max(1, int(FULL * speed / fastest)) for site, speed in speeds.items()}


def site_weights(
    rule: str, batches: Mapping[str, int], paces: Mapping[str, int], inner_steps: int = 0
) -> dict[str, float]:
    """w_i of docs/algorithm.md §2 by site, their mean is 1.

    With b the sequences per step and p the pace in a round of `inner_steps` (0: a long one), which
    is that of a step at least, `equal`: w ~ b, every pseudo-gradient counts as it
    is; `tokens`: w ~ b p, by the tokens that it was made from; `fednova`: w ~ b / p, so that the
    mean is one of displacements *per step*, whose length is that of the harmonic mean of the sites'
    steps (Wang et al. 2020, arXiv 2007.07481, eq. 8, which leaves that length open).
    """
    powers = {"equal": 0, "tokens": 1, "fednova": -1}
    least = FULL / inner_steps if inner_steps else 0.0
    taken = {site: max(paces[site], least) / FULL for site in batches}
    raw = {site: batch * taken[site] ** powers[rule] for site, batch in batches.items()}
    mean = sum(raw.values()) / len(raw)
    return {site: value / mean for site, value in raw.items()}


def limited(
    weights: Mapping[str, float], batches: Mapping[str, int], most: float
) -> dict[str, float]:
    """The same weights with the same mean, none of them more than a share `most` of all, or than
    its share of the batch if that is more. `most` is a half at least; two sites are left as they
    are: of two, one has a half or more.
    """
    if len(weights) < 3:
        return dict(weights)
    total, everything = sum(weights.values()), sum(batches.values())
    for site, weight in weights.items():
        limit = max(most, batches[site] / everything)
        if weight / total > limit:
            factor = total * (1.0 - limit) / (total - weight)
            return {
                name: total * limit if name == site else other * factor
                for name, other in weights.items()
            }
    return dict(weights)


def middle(values: Sequence[int]) -> int:
    """The median; of an even number the lower of the two."""
    return sorted(values)[(len(values) - 1) // 2]
