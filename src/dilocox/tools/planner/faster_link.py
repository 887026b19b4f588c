"""Finds the link with which the network no longer holds a run up, by predicting the run with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dilocox.tools.planner.core_plan import Cluster, CorePlan
from dilocox.tools.planner.hardware_table import Link
from dilocox.tools.planner.predict import Prediction

SMALL = 0.05
"""Shares of the time below this are not worth a sentence."""
FACTORS = (1, 2, 4, 8)
"""Multiples of the estimated rate that are tried."""
LEAST = 1.25
"""Least rate worth naming, as a multiple of the present rate."""


@dataclass(frozen=True)
class FasterLink:
    """The link that was found, or the fastest link that was tried."""

    rate: float
    """Bytes per second on the wire, in both directions."""
    enough: bool
    """Whether the slowest site waits for the network less than `SMALL` of the time with it. False
    if not even this link is enough."""


def faster_link(own: CorePlan, cluster: Cluster) -> FasterLink | None:
    """Return the slowest of the tried links with which the network no longer holds the run up.

    Every named rate was predicted, with the rounds that the controller then chooses. Links that
    are faster already stay as they are. None if the network does not hold the run up, or if
    payloads use the link for too little time for any rate to matter.
    """
    prediction = own.prediction
    share = waited(prediction)
    # Fixed costs take most of the time waited if payloads use the link for less than half of it.
    if share < SMALL or prediction.exchange_seconds < share * prediction.round_seconds / 2:
        return None
    now = min(min(link.up, link.down) for link in cluster.links)
    estimate = _rounded_up(max(_estimated(own, now, share), LEAST * now))

    def is_enough(rate: float) -> bool:
        links = [_at_least(link, rate) for link in cluster.links]
        found = replace(cluster, links=links).predict(own.config, own.outline)
        return found.tokens_per_second > prediction.tokens_per_second and waited(found) <= SMALL

    rates = [_rounded_up(factor * estimate) for factor in FACTORS]
    if is_enough(rates[0]):
        return FasterLink(rates[0], enough=True)
    # Most runs that the estimate does not help are held up by fixed costs, at every rate.
    if not is_enough(rates[-1]):
        return FasterLink(rates[-1], enough=False)
    for rate in rates[1:-1]:
        if is_enough(rate):
            return FasterLink(rate, enough=True)
    return FasterLink(rates[-1], enough=True)


def waited(prediction: Prediction) -> float:
    """Return the share of the slowest site's time in which training waits for the network."""
    return prediction.course.waited_share_of(prediction.course.slowest)


def _estimated(own: CorePlan, now: float, share: float) -> float:
    """Return a rate at which payloads would take no longer than they may, without fixed costs.

    `now`: present rate of the slowest link. `share`: share of the time waited with it.
    """
    prediction, choice = own.prediction, own.prediction.choice
    if own.config.exchanges_gradients or choice.delay == 0:
        # Training stands still during the whole transfer.
        most = SMALL / (1 - SMALL)
    else:
        # A payload has the slots from its boundary to its landing, and no others.
        most = min(1.0, choice.fragments * choice.delay / choice.slots)
    busy = prediction.exchange_seconds / max(1e-9, prediction.round_seconds)
    return now * busy / (most * max(1e-9, 1 - share))


def _at_least(link: Link, rate: float) -> Link:
    return replace(link, up=max(link.up, rate), down=max(link.down, rate))


def _rounded_up(rate: float) -> float:
    """Return `rate`, in bytes per second, rounded up to two digits of its bits per second."""
    unit = 10.0 ** (math.floor(math.log10(8 * rate)) - 1)
    return math.ceil(8 * rate / unit - 1e-9) * unit / 8
