"""The price of a run against the price of the same run in one cluster with a fast network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dilocox.tools.planner.hardware_table import GpuPlacement

if TYPE_CHECKING:
    from dilocox.tools.planner.plan import RunPlan


@dataclass(frozen=True)
class Comparison:
    """The same tokens on as many GPUs of the same kind at one place, where no exchange waits."""

    gpus: int
    usd_per_hour: float
    """Price of one GPU there, in US dollars per hour, its share of the network included."""
    seconds: float
    """Time of the run there."""
    usd: float
    """Price of the run there, in US dollars."""
    saved: float | None
    """Share of that price which the run over several sites saves. Negative: it costs more. None:
    the run's own price is unknown, or the price there is 0."""
    equal_usd_per_hour: float | None
    """Price of one GPU there, in US dollars per hour, at which both runs cost the same. None: the
    run's own price is unknown."""


def compare(plan: RunPlan, usd_per_hour: float) -> Comparison:
    """Compare a plan with a cluster whose GPUs cost `usd_per_hour` each.

    The cluster is as fast as the sites without exchanges. What the sites' GPUs cost is the price in
    the table of devices, or the user's own price.
    """
    gpus = sum(1 if place.device.shared else place.gpus for place in plan.places)
    alone = plan.prediction.tokens_per_second / plan.prediction.share
    seconds = plan.budget.tokens / alone
    hours = gpus * seconds / 3600
    usd, own = hours * usd_per_hour, plan.budget.usd
    return Comparison(
        gpus,
        usd_per_hour,
        seconds,
        usd,
        None if own is None or usd == 0 else 1 - own / usd,
        None if own is None else own / hours,
    )


def at_price(places: Sequence[GpuPlacement], prices: Sequence[float]) -> list[GpuPlacement]:
    """Return the placements of all sites with the user's own prices of their GPUs.

    `prices`: US dollars per GPU and hour; none, one, or one for each site.
    """
    if not prices:
        return list(places)
    every = list(prices) * (len(places) if len(prices) == 1 else 1)
    return [
        replace(place, device=replace(place.device, usd_per_hour=usd, price_source="--rent"))
        for place, usd in zip(places, every, strict=True)
    ]
