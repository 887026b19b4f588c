"""Host memory that ranks on GPUs need, and whether it fits their machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.config.run_config import RunConfig
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.memory_footprint import Footprint


@dataclass(frozen=True)
class HostMemory:
    """Host memory that the ranks of one machine need."""

    place: GpuPlacement
    ranks: int
    """Ranks of the site's first replica on the machine. Ranks of other replicas keep nothing in
    host memory."""
    needed: int
    """Bytes of host memory."""
    available: int | None
    """Bytes of the machine's memory. None: unknown."""

    @property
    def fits(self) -> bool:
        """Whether the need fits the machine. True if the machine's memory is unknown."""
        return self.available is None or self.needed <= self.available


def host_memory(
    machines: Sequence[tuple[GpuPlacement, Sequence[Footprint]]], config: RunConfig
) -> HostMemory | None:
    """Return the machine whose memory is filled most by its ranks.

    All ranks of a machine are taken as large as the largest rank. Among machines of unknown size
    it is the machine with the largest need. None if no site has GPUs: the device is then the
    machine's memory itself.

    Args:
        machines: Placements, each with its own footprints by stage. Footprints of a site without
            GPUs have nothing in host memory.
        config: The run.
    """
    found = []
    for place, stages in machines:
        if not place.device.shared:
            ranks = min(place.per_node, config.site.exchanging_ranks)
            needed = machine_bytes(stages, ranks, config.site.shards)
            found.append(HostMemory(place, ranks, needed, place.device.host.memory))

    def filled(one: HostMemory) -> tuple[float, int]:
        return (one.needed / one.available if one.available else 0.0, one.needed)

    return max(found, key=filled, default=None)


def machine_bytes(stages: Sequence[Footprint], ranks: int, shards: int) -> int:
    """Return the host memory in bytes of `ranks` ranks on one machine, all as large as the largest.

    Exchanges end before the model is published, so only the larger of the two counts. For
    publishing, one of every `shards` ranks gathers its whole stage.
    """
    lasting = max(each.host_lasting for each in stages)
    exchanges = max(each.host_exchanges for each in stages)
    published = max(each.published for each in stages)
    first_shards = -(-ranks // shards)
    return ranks * lasting + max(ranks * exchanges, first_shards * published)
