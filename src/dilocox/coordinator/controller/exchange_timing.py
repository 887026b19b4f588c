"""How long the exchanges of a round keep a link busy, and how late the latest of them ends.

All fragments of all stages share their site's link, in the order of their boundaries
(`dilocox.coordinator.protocol.round_plan`). Times are integer microseconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.config.codec_spec import FRAME_HEADER_BYTES
from dilocox.coordinator.controller.link_estimator import Estimate
from dilocox.coordinator.protocol.fragment_groups import pieces_of
from dilocox.coordinator.protocol.round_plan import AT_ONCE, boundary_slots

Sizes = Sequence[Sequence[int]]
"""Bytes of one site's payload by stage and piece (or fragment), summed over shards."""


@dataclass(frozen=True)
class Traffic:
    """Cost of the exchanges of one round at one site."""

    payload_bytes: int
    """Bytes that a site sends in a round; it receives as many."""
    busy_us: int
    """Microseconds that the exchanges of a round take on the link, or in the threads of the busiest
    stage if that is longer."""
    latest_us: int
    """Longest time from a boundary to the end of its exchange, in microseconds, with the wait for
    earlier exchanges."""


def together(sizes: Sizes, fragments: int, shards: int) -> Sizes:
    """Return the payload sizes of fragments from the sizes of pieces.

    Each fragment has one frame header per shard, instead of one per piece and shard.
    """
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
    """Number of sites, and the mode in which their payloads travel (`outer.exchange`)."""

    sites: int
    exchange: str

    def swaps(self, payload: int) -> tuple[int, int]:
        """Return number and bytes of the swaps of one exchange with payloads of `payload` bytes.

        In a swap a site receives from all others at the same time, so latency counts once.
        """
        others = self.sites - 1
        if self.exchange == "gather":
            return 1, others * payload
        return 2, others * -(-payload // self.sites)


def traffic(sizes: Sizes, slots: int, slot_us: int, link: Estimate, crowd: Crowd,
            latency_us: int) -> Traffic:  # fmt: skip
    """Simulate the exchanges of a round of `slots` slots of `slot_us` microseconds each.

    `sizes` are the payloads by stage and fragment. `latency_us` is the time of an exchange beside
    its transfers, in addition to the estimate's overhead; half of both passes before the transfers
    and half after. Transfers follow one another, and each stage has up to `AT_ONCE` exchanges in
    flight. Two rounds are simulated, because the first exchange of a round may wait for the last
    one of the round before.
    """
    stages, fragments = len(sizes), len(sizes[0])
    due: list[tuple[int, int, int, int]] = []
    """(slot, fragment, stage, microseconds of transfer), in the order of the transfers."""
    total = transfers = 0
    work = [0] * stages
    """Microseconds of a round in the threads of each stage."""
    beside = latency_us + link.overhead_of(fragments)
    for stage, row in enumerate(sizes):
        slots_of = boundary_slots(stage, stages, fragments, slots)
        for fragment, (slot, payload) in enumerate(zip(slots_of, row, strict=True)):
            count, each = crowd.swaps(payload)
            time_us = count * link.transfer_us(each)
            due.append((slot, fragment, stage, time_us))
            total += count * each
            transfers += time_us
            work[stage] += beside + time_us
    due.sort()
    before = beside // 2
    link_free = latest = 0
    free = [[0] * AT_ONCE for _ in range(stages)]
    """Moments at which the threads of each stage are free, the earliest first."""
    for round_ in (0, 1):
        for slot, _, stage, time_us in due:
            begin = (round_ * slots + slot) * slot_us
            # Transfers end one after the other, so what ends now ends last in its stage, too.
            first = free[stage].pop(0)
            link_free = max(begin + before, first + before, link_free) + time_us
            over = link_free + beside - before
            free[stage].append(over)
            latest = max(latest, over - begin)
    longest = -(-max(work) // AT_ONCE)
    return Traffic(total, max(transfers, longest), latest)
