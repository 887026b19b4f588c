"""How long the exchanges of a round keep a link busy, and how late the last of them is.

All fragments of all stages share their site's link, in the order of their boundaries
(`dilocox.coordinator.protocol.schedule`). Whole microseconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.config.codec_spec import FRAME_HEADER_BYTES
from dilocox.coordinator.controller.link_estimator import Estimate
from dilocox.coordinator.protocol.fragment_groups import pieces_of
from dilocox.coordinator.protocol.schedule import AT_ONCE, boundary_slots

Sizes = Sequence[Sequence[int]]
"""Bytes of one site's payload by stage and piece, summed over shards."""


@dataclass(frozen=True)
class Traffic:
    """The exchanges of one round at one site."""

    payload_bytes: int
    """What a site sends, and receives, in a round."""
    busy_us: int
    """Time that its exchanges take: of the link, or of the threads of the busiest stage if that is
    more."""
    latest_us: int
    """From a boundary until its exchange is over, at worst; the queue before it included."""


def together(sizes: Sizes, fragments: int, shards: int) -> Sizes:
    """What pieces of `sizes` take that are exchanged as so many fragments: their payloads, with
    one frame's header for each fragment and shard."""
    pieces = len(sizes[0])
    if fragments == pieces:
        return sizes
    runs = [pieces_of(fragment, fragments, pieces) for fragment in range(fragments)]
    header = FRAME_HEADER_BYTES * shards
    return [
        [sum(row[piece] for piece in run) - (len(run) - 1) * header for run in runs]
        for row in sizes
    ]


@dataclass(frozen=True)
class Crowd:
    """How payloads travel between `sites` sites: `exchange` is the run file's."""

    sites: int
    exchange: str

    def swaps(self, payload: int) -> tuple[int, int]:
        """(number, bytes each) of the swaps of one exchange of such a payload: in each a site
        receives from all others at the same time, so that latency passes once."""
        others = self.sites - 1
        if self.exchange == "gather":
            return 1, others * payload
        return 2, others * -(-payload // self.sites)


def traffic(sizes: Sizes, slots: int, slot_us: int, link: Estimate, crowd: Crowd,
            latency_us: int) -> Traffic:  # fmt: skip
    """Exchanges of payloads of `sizes` in rounds of `slots` slots of `slot_us` each.

    `latency_us`: of an exchange, beside what its transfers take: half of it, and of what the
    estimate has for that, passes before them and half after. Transfers follow one another; beside
    them, each stage has `AT_ONCE` exchanges under way. Two rounds in a row are followed, since the
    first exchange of a round may wait for the last of the round before.
    """
    stages, fragments = len(sizes), len(sizes[0])
    due: list[tuple[int, int, int, int]] = []
    """(slot, fragment, stage, microseconds of transfer), in the order in which they are carried."""
    total = 0
    for stage, row in enumerate(sizes):
        slots_of = boundary_slots(stage, stages, fragments, slots)
        for fragment, (slot, payload) in enumerate(zip(slots_of, row, strict=True)):
            count, each = crowd.swaps(payload)
            due.append((slot, fragment, stage, count * link.transfer_us(each)))
            total += count * each
    due.sort()
    beside = latency_us + link.overhead_of(fragments)
    link_free = latest = 0
    free = [[0] * AT_ONCE for _ in range(stages)]
    """When the threads of each stage are free, the next one first."""
    for round_ in (0, 1):
        for slot, _, stage, time_us in due:
            begin = (round_ * slots + slot) * slot_us
            first, *others = free[stage]
            link_free = max(max(begin, first) + beside // 2, link_free) + time_us
            over = link_free + beside - beside // 2
            free[stage] = sorted([*others, over])
            latest = max(latest, over - begin)
    transfers = sum(time_us for *_, time_us in due)
    busiest = max(
        sum(beside + time_us for _, _, other, time_us in due if other == stage)
        for stage in range(stages)
    )
    longest = -(-busiest // AT_ONCE)
    return Traffic(total, max(transfers, longest), latest)
