"""Replicas in place of shards, where the shards of a site gather parameters between its nodes."""

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
"""Share of a step that a change of the layout has to save."""


@dataclass(frozen=True)
class Hybrid:
    """A layout of the same GPUs whose shards gather parameters inside of nodes."""

    replicas: int
    shards: int
    step: StepTime


def hybrid(
    config: RunConfig, outline: ModelOutline, place: GpuPlacement, fabric: float, rounds: Choice
) -> Hybrid | None:
    """The fastest such layout that fits the GPUs. None if none is faster than the run's own.

    `config`: with the batch of the site at `place` as that of `[site]`. `fabric`: bytes per second
    of a node's network inside its site.
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
            continue  # a gate, or anything else that does not go with replicas
        run = on_device(run, device)
        shape = ModelOutline(run, outline.blueprint)
        places = footprints(run, shape, place, counted(run, shape), rounds)
        host = host_memory(places, [place], run)
        if needed(places, place, run) <= device.memory and (host is None or host.fits):
            found.append(Hybrid(replicas, shards, step_time(run, shape, place, fabric)))
    best = min(found, key=lambda each: each.step.seconds, default=None)
    own = step_time(config, outline, place, fabric).seconds
    return best if best is not None and best.step.seconds < (1 - LEAST_GAIN) * own else None
