"""Which ranks are alive, how fast they advance, and the lease. Pure: time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server.exchange_votes import RankKey

LEASE_BEATS = 2
"""A lease lets the fastest rank train for about this many beats without a reply."""
LEASE_LEAST = 2
"""Least number of slots of a lease."""
LEASE_MOST = 10_000
"""Largest number of slots of a lease."""


@dataclass
class Pulse:
    """Latest beat of one rank."""

    seen: float
    """Moment of the beat in seconds, or the moment from which a first beat is expected."""
    limit: float
    """Allowed time without a beat after `seen`, in seconds."""
    beaten: bool = False
    """Whether a beat has come that says that the rank can take part."""
    tick: int = 0
    """Slots that the rank has finished."""
    slot_seconds: float | None = None
    """Seconds per slot. None: not known yet."""
    since: tuple[float, int] | None = None
    """Moment of the first beat with finished slots, and their number. Slots are timed from there
    until the rank reports its own time."""


class Liveness:
    """Latest beats of the ranks of all live sites."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._pulses: dict[RankKey, Pulse] = {}
        self._looked: float | None = None

    def expect(self, rank: RankKey, now: float, limit: float) -> None:
        """Expect a beat of a rank within `limit` seconds."""
        self._pulses[rank] = Pulse(now, limit)

    def forget(self, site: str, rank: tuple[int, int] | None = None) -> None:
        """Expect no further beats of a site, or of one of its ranks (stage, shard)."""
        for key in [key for key in self._pulses if key[0] == site]:
            if rank is None or key[1:] == rank:
                del self._pulses[key]

    def beat(
        self,
        rank: RankKey,
        now: float,
        tick: int,
        slot_seconds: float | None,
        building: bool = False,
    ) -> None:
        """Note a beat of a rank that has finished `tick` slots.

        `slot_seconds` is the rank's own time per slot, if known. A rank that is still `building`
        its model is alive, but does not count as present.
        """
        if building:
            # The rank may be busy with one large file, so the full time is allowed again.
            self.expect(rank, now, self._timeouts.first_beat)
            return
        pulse = self._pulses.setdefault(rank, Pulse(now, self._timeouts.silence))
        # Time only from the first tick above 0: a resumed or entering rank jumps to it.
        since = pulse.since or ((now, tick) if tick else None)
        if slot_seconds is None:
            slot_seconds = pulse.slot_seconds
            # A beat comes in the middle of a slot, so one slot fewer is certain for this time. Two
            # beats around a slot's end would otherwise make slots look as short as a beat. The
            # lease would then be too long, and a stop too late.
            if since is not None and tick >= since[1] + 2:
                slot_seconds = max(now - since[0], 1e-6) / (tick - since[1] - 1)
        self._pulses[rank] = Pulse(now, self._timeouts.silence, True, tick, slot_seconds, since)

    def all_beaten(self, site: str) -> bool:
        """Return whether every expected rank of a site has sent a beat."""
        pulses = [pulse for key, pulse in self._pulses.items() if key[0] == site]
        return bool(pulses) and all(pulse.beaten for pulse in pulses)

    def overdue(self, now: float) -> dict[str, str]:
        """Return the sites with a rank that has been silent for too long, with the reason.

        Call it often. If the coordinator itself was held up between two calls, this time does not
        count: after a pause, the coordinator must not declare all sites lost.
        """
        if self._looked is not None and now - self._looked > self._timeouts.heartbeat / 2:
            for pulse in self._pulses.values():
                pulse.seen = max(pulse.seen, min(now, pulse.seen + now - self._looked))
        self._looked = now
        dead: dict[str, str] = {}
        for (site, stage, shard), pulse in self._pulses.items():
            if now - pulse.seen > pulse.limit and site not in dead:
                dead[site] = f"no beat from stage {stage} shard {shard} for {pulse.limit:g} s"
        return dead

    def lease(self, granted: int, sites: list[str]) -> int:
        """Return the lease for active `sites`: `granted`, or a later tick if it nearly runs out."""
        pulses = [pulse for key, pulse in self._pulses.items() if key[0] in sites and pulse.beaten]
        if not pulses:
            return granted
        first = max(pulses, key=lambda pulse: pulse.tick)
        slots = LEASE_LEAST
        if first.slot_seconds is not None:
            slots = min(
                LEASE_MOST,
                max(slots, math.ceil(LEASE_BEATS * self._timeouts.beat / first.slot_seconds)),
            )
        # While half of the lease is left, no event is logged, so not every beat causes one.
        if granted - first.tick >= max(LEASE_LEAST, slots // 2):
            return granted
        return max(granted, first.tick + slots)
