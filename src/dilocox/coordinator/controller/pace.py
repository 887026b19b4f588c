"""Paces of sites, from declared or measured speeds, and the weights of their contributions.

A site's *pace* is its speed in thousandths of the typical site's; `step_share` computes a site's
inner steps from it.

If the run file declares speeds, the typical site is the fastest one. A measured speed is a site's
own claim. So of three or more sites the typical site is the median one, of an even number the
faster of the two in the middle. A minority that claims to be fast then takes no steps from the
others, and gets more steps itself. Of two sites the typical one is the faster, because neither has
a majority.

Pure functions of integers. Times are microseconds, measured by the sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dilocox.coordinator.protocol.step_share import FULL

ALIKE = 950
"""A pace between this and its reciprocal counts as `FULL`, because equal machines differ by a few
per cent from round to round."""
GRAIN = 10
"""Measured paces are rounded down to multiples of this."""
SLOWER, FASTER = 20, 50
"""The current pace is kept while the measured one is below it by at most SLOWER thousandths, or
above it by at most FASTER thousandths."""
ROUNDS = 3
"""Least number of rounds whose median is a site's step time, so that one disturbed round (by a
checkpoint, for example) has no effect. A site with fewer rounds gets no pace above `FULL`."""
RISE = 1500
"""A pace above `FULL` grows at most by this factor, in thousandths, from one round to the next. So
a site with a false claim comes late to its exchanges before the others have waited long."""
MAJORITY = 3
"""Least number of sites of which a majority can outvote one."""
PERIOD_US = 60_000_000
"""If rounds are short, the median is over all rounds of this time, in microseconds. A machine that
is busy for some seconds is not slow: paced by those seconds, it would idle in the next ones."""
MOST_ROUNDS = 40
"""Largest number of rounds for the median."""
SURE, UNSURE = 8, 750
"""Until a site has measured SURE rounds, or all rounds for the median, paces between UNSURE and its
reciprocal count as `FULL`. This does not apply to a site whose current pace is not `FULL`."""


def rounds_looked_at(inner_steps: int, step_us: int) -> int:
    """Return from how many of the latest rounds paces are measured.

    A round has `inner_steps` steps of the typical site, of `step_us` microseconds each.
    """
    return min(MOST_ROUNDS, max(ROUNDS, PERIOD_US // max(1, inner_steps * step_us)))


def measured_paces(
    step_us: Mapping[str, Sequence[int]],
    before: Mapping[str, int],
    rounds: int = ROUNDS,
    most: float = math.inf,
) -> dict[str, int]:
    """Return the pace of every site from its measured step times.

    Args:
        step_us: By site, step times of the latest rounds in microseconds, oldest first.
        before: Current paces by site.
        rounds: Number of latest rounds that count.
        most: Highest speed of a site, relative to the median of the others and to the typical site.

    A site without step times keeps its pace, or gets `FULL`. A new site with fewer than `ROUNDS`
    rounds does not count for the typical step time, unless too few others do, and gets no pace
    above `FULL`. Paces above `FULL` grow gradually (`RISE`).
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
    """Return the shortest step time that a site may claim, from the others' median; 0 if alone."""
    others = [time for other, time in own.items() if other != site]
    return int(middle(others) / most) if others else 0


def declared_paces(speeds: Mapping[str, float]) -> dict[str, int]:
    """Return paces from speeds in any unit, in thousandths of the fastest site's speed."""
    fastest = max(speeds.values())
    return {site: max(1, int(FULL * speed / fastest)) for site, speed in speeds.items()}


def site_weights(
    rule: str, batches: Mapping[str, int], paces: Mapping[str, int], inner_steps: int = 0
) -> dict[str, float]:
    """Return the weights w_i of docs/algorithm.md §2 by site; their mean is 1.

    Let b be a site's sequences per step (`batches`) and p its pace (`paces`). The pace is at least
    that of one step in a round of `inner_steps` (0: a long round, without this bound). The rules:

    - `equal`: w ~ b; every pseudo-gradient counts as it is.
    - `tokens`: w ~ b p; a pseudo-gradient counts by the tokens behind it.
    - `fednova`: w ~ b / p; the mean is one of displacements *per step*, and its length is that of
      the harmonic mean of the sites' steps. (Wang et al. 2020, arXiv 2007.07481, eq. 8, which
      leaves this length open.)
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
    """Return the weights with the same mean, limited so that no site dominates.

    A weight is at most the share `most` of the sum, or the site's share of the batch if that is
    more. `most` is at least a half, so at most one weight is limited. Weights of fewer than three
    sites are not changed, because of two sites one always has a half or more.
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
    """Return the lower median."""
    return sorted(values)[(len(values) - 1) // 2]
