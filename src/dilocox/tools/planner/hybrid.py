"""Finds a hybrid-sharding layout: more replicas, and shards that stay inside one node."""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.choice import Choice
from dilocox.errors import DilocoxError
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.host_memory import host_memory
from dilocox.tools.planner.memory_footprint import counted, footprints, needed
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.step_time import StepTime, stays_on_nodes, step_time
from dilocox.tools.planner.variants import changed, on_device

LEAST_GAIN = 0.05
"""Share of a step's time that a change of the layout must save to be named."""


@dataclass(frozen=True)
class Hybrid:
    """A layout of the same GPUs whose shards gather parameters inside one node."""

    replicas: int
    shards: int
    step: StepTime


def hybrid(
    config: RunConfig, outline: ModelOutline, place: GpuPlacement, fabric: float, rounds: Choice
) -> Hybrid | None:
    """Return the fastest hybrid layout that fits in memory.

    Args:
        config: The run, with the batch size of the site at `place` as `site.batch_size`.
        outline: Outline of the run's model.
        place: GPUs of the site.
        fabric: Bytes per second of a node's network inside its site.
        rounds: Plan of the rounds, which the memory of exchanges depends on.

    Returns:
        The layout. None if the run's own shards stay inside one node already, or if no layout
        saves at least `LEAST_GAIN` of a step.
    """
    site, device = config.site, place.device
    if device.shared or stays_on_nodes(config, place, site.shards):
        return None
    found: list[Hybrid] = []
    for shards in range(1, site.shards):
        if site.shards % shards or place.per_node % shards:
            continue
        replicas = site.replicas * site.shards // shards
        try:
            run = changed(config, {"site.replicas": replicas, "site.shards": shards})
        except DilocoxError:
            continue  # a setting of the run, such as the loss gate, does not allow replicas
        run = on_device(run, device)
        shape = ModelOutline(run, outline.blueprint)
        places = footprints(run, shape, place, counted(run, shape), rounds)
        host = host_memory(places, [place], run)
        if needed(places, place, run) <= device.memory and (host is None or host.fits):
            found.append(Hybrid(replicas, shards, step_time(run, shape, place, fabric)))
    best = min(found, key=lambda each: each.step.seconds, default=None)
    own = step_time(config, outline, place, fabric).seconds
    return best if best is not None and best.step.seconds < (1 - LEAST_GAIN) * own else None
