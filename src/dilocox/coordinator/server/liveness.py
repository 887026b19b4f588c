"""Which ranks are alive, and how fast they go. Pure: time enters as an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server.exchange_votes import RankKey

LEASE_BEATS = 2
"""A lease lets the fastest rank run on for about this many of its beats."""
LEASE_LEAST = 2
LEASE_MOST = 10_000


@dataclass
class Pulse:
    """Latest beat of one rank. `limit`: silence allowed after `seen`, in seconds."""

    seen: float
    limit: float
    beaten: bool = False
    tick: int = 0
    slot_seconds: float | None = None
    since: tuple[float, int] | None = None
    """When the rank first said that it had finished slots, and how many: until it has timed a round
    itself, slots are timed from there."""


class Liveness:
    """Pulses of the ranks of all live sites."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._pulses: dict[RankKey, Pulse] = {}
        self._looked: float | None = None

    def expect(self, rank: RankKey, now: float, limit: float) -> None:
        """A rank has to beat within `limit` seconds."""
        self._pulses[rank] = Pulse(now, limit)

    def forget(self, site: str, rank: tuple[int, int] | None = None) -> None:
        """Nothing is expected any more of a site, or of one of its ranks."""
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
        """A rank is alive and has finished `tick` slots; or is still `building` its model, and
        then not there yet."""
        if building:
            # It may be busy with one large file, so it has as long again.
            self.expect(rank, now, self._timeouts.first_beat)
            return
        pulse = self._pulses.setdefault(rank, Pulse(now, self._timeouts.silence))
        # The way from 0 may be a jump: a resumed or entering rank starts further on.
        since = pulse.since or ((now, tick) if tick else None)
        if slot_seconds is None:
            slot_seconds = pulse.slot_seconds
            # A beat comes in the middle of a slot: so much time holds one slot fewer for sure. Two
            # beats in a row around a slot's end would make slots out to be as short as a beat, the
            # lease as much too long, and a stop as much too late.
            if since is not None and tick >= since[1] + 2:
                slot_seconds = max(now - since[0], 1e-6) / (tick - since[1] - 1)
        self._pulses[rank] = Pulse(now, self._timeouts.silence, True, tick, slot_seconds, since)

    def all_beaten(self, site: str) -> bool:
        """Every expected rank of a site has beaten."""
        pulses = [pulse for key, pulse in self._pulses.items() if key[0] == site]
        return bool(pulses) and all(pulse.beaten for pulse in pulses)

    def overdue(self, now: float) -> dict[str, str]:
        """Reason by site, for sites with a rank that has been silent for too long.

        To be called often. If the caller itself was held up, that time does not count: a
        coordinator that was asleep must not take everybody for dead.
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
        """The lease for the ranks of active `sites`: `granted`, or more if it runs out."""
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
        # Half of it left is enough: not every beat makes an event.
        if granted - first.tick >= max(LEASE_LEAST, slots // 2):
            return granted
        return max(granted, first.tick + slots)
