"""Finds a hybrid-sharding layout: more replicas, and shards that stay inside one node."""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.errors import DilocoxError
from dilocox.tools.planner.core_plan import Cluster, CorePlan, Planned
from dilocox.tools.planner.step_time import StepTime, stays_on_nodes, step_time
from dilocox.tools.planner.variants import at_site, changed

LEAST_GAIN = 0.05
"""Share of a step's time that a change of the layout must save to be named."""


@dataclass(frozen=True)
class Hybrid:
    """A layout of the same GPUs whose shards gather parameters inside one node."""

    replicas: int
    shards: int
    step: StepTime
    """Inner step, with this layout, of the site that the others then wait for."""


def hybrid(own: CorePlan, cluster: Cluster, planned: Planned) -> Hybrid | None:
    """Return the fastest hybrid layout that fits in memory.

    Args:
        own: Plan of the run without a change.
        cluster: Where the run is planned.
        planned: Plans the run with changed keys.

    Returns:
        The layout. None if the shards of the slowest site stay inside one node already, or if no
        layout saves at least `LEAST_GAIN` of a step.
    """
    slowest = own.prediction.course.slowest
    config, place = at_site(own.config, list(own.config.sites)[slowest]), cluster.places[slowest]
    site, most = config.site, (1 - LEAST_GAIN) * own.step.seconds
    if place.device.shared or stays_on_nodes(config, place, site.shards):
        return None
    estimates: list[tuple[float, int]] = []
    for shards in range(1, site.shards):
        if site.shards % shards or place.per_node % shards:
            continue
        layout = _layout(site.replicas * site.shards, shards)
        try:
            run = changed(config, layout)
        except DilocoxError:
            continue  # a setting of the run, such as the loss gate, does not allow replicas
        estimates.append((step_time(run, own.outline, place, cluster.fabric).seconds, shards))
    for seconds, shards in sorted(estimates):
        layout = _layout(site.replicas * site.shards, shards)
        if seconds >= most:
            break
        try:
            found = planned(layout, None)
        except DilocoxError:
            continue  # the batch of another site does not allow these replicas
        if own.keeps(found) and found.step.seconds < most:
            return Hybrid(layout["site.replicas"], shards, found.step)
    return None


def _layout(ranks: int, shards: int) -> dict[str, int]:
    """Return the keys of a layout with `shards` shards, and `ranks` ranks of each stage."""
    return {"site.replicas": ranks // shards, "site.shards": shards}
