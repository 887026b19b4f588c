"""What ranks on GPUs keep in the memory of their machines, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.config.run_config import RunConfig
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.memory_footprint import Footprint


@dataclass(frozen=True)
class HostMemory:
    """What the ranks of one machine take of its memory, beside their GPUs."""

    place: GpuPlacement
    ranks: int
    """Of the first replica of one site, on that machine: others keep nothing there."""
    needed: int
    available: int | None
    """None: not known."""

    @property
    def fits(self) -> bool:
        """It is not known to be too much."""
        return self.available is None or self.needed <= self.available


def host_memory(
    stages: Sequence[Footprint], places: Sequence[GpuPlacement], config: RunConfig
) -> HostMemory | None:
    """The machine that is filled most by what ranks keep outside their GPUs, the largest of them
    side by side; of machines whose memory is not known that which needs most. None where every
    device is the machine's memory itself."""
    found = []
    for place in places:
        if not place.device.shared:
            ranks = min(place.per_node, config.site.exchanging_ranks)
            needed = machine_bytes(stages, ranks, config.site.shards)
            found.append(HostMemory(place, ranks, needed, place.device.host.memory))

    def filled(one: HostMemory) -> tuple[float, int]:
        return (one.needed / one.available if one.available else 0.0, one.needed)

    return max(found, key=filled, default=None)


def machine_bytes(stages: Sequence[Footprint], ranks: int, shards: int) -> int:
    """Bytes of `ranks` ranks side by side on one machine, each as large as the largest.

    Exchanges end before the model is published, which the first of every `shards` ranks gathers.
    """
    lasting = max(each.host_lasting for each in stages)
    exchanges = max(each.host_exchanges for each in stages)
    published = max(each.published for each in stages)
    first_shards = -(-ranks // shards)
    return ranks * lasting + max(ranks * exchanges, first_shards * published)
