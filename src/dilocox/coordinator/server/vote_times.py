"""Which sites hold up an exchange because they do not vote. Pure: time is an argument.

When all other sites have voted, all payloads have arrived there. A missing site may still receive
over a slow link. So it has `FACTOR` times as long as the others took, or as it usually takes, plus
the time in which its own ranks notice a peer that hangs. Sites are overtaken (`events.Overtaken`)
only if at least as many sites wait as are missing.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.arrivals import Arrivals
from dilocox.coordinator.server.exchange_votes import Exchange
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.coordinator.server.stragglers import Straggler

FACTOR = 10.0
REMEMBERED = 16
"""Number of a site's latest exchanges from which its usual time is taken."""


class VoteTimes:
    """How long sites take from the beginning of an attempt to their votes."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[int, float]] = {}
        """By exchange: the attempt, and the moment when all ranks had arrived for it."""
        self._voted: dict[str, dict[str, float]] = {}
        """By exchange and site: moment of the last vote in the current attempt."""
        self._took: dict[str, deque[float]] = {}
        self._looked: float | None = None

    def happened(self, event: e.Event, now: float) -> None:
        """Note an event that was applied."""
        if isinstance(event, e.Voted):
            self._voted.setdefault(event.key, {})[event.site] = now
            _, began = self._began.setdefault(event.key, (event.attempt, now))
            took = self._took.setdefault(event.site, deque(maxlen=REMEMBERED))
            took.append(now - began)
        elif isinstance(event, e.Decided | e.Retried):
            self._began.pop(event.key, None)
            self._voted.pop(event.key, None)
        elif isinstance(event, e.SiteLost):
            self._took.pop(event.site, None)

    def look(self, now: float, limit: float) -> None:
        """See `Arrivals.look`."""
        pause = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if pause > limit:
            self._began = {key: (n, at + pause) for key, (n, at) in self._began.items()}
            for votes in self._voted.values():
                votes.update({site: at + pause for site, at in votes.items()})

    def overdue(
        self, state: CoordinatorState, arrivals: Arrivals, now: float, limits: Timeouts
    ) -> list[Straggler]:
        """Return sites of one exchange without whose votes the others go on; usually none."""
        self._began = {k: each for k, each in self._began.items() if k in state.undecided}
        self._voted = {k: each for k, each in self._voted.items() if k in state.undecided}
        if state.phase != "running" or state.config.exchanges_gradients:
            return []
        for key in state.undecided:
            exchange = state.exchanges[key]
            self._begin(state, arrivals, exchange, now)
            found = self._late(state, exchange, now, limits)
            if found:
                return found
        return []

    def _begin(
        self, state: CoordinatorState, arrivals: Arrivals, exchange: Exchange, now: float
    ) -> None:
        """Note when all ranks have arrived for an attempt; a new attempt voids earlier votes."""
        key = exchange.key
        if self._began.get(key, (0, 0.0))[0] != exchange.attempt:
            self._began.pop(key, None)
            self._voted.pop(key, None)
            if arrivals.awaited(key, state.voters(exchange)) is None and arrivals.present(key):
                self._began[key] = (exchange.attempt, now)

    def _late(
        self, state: CoordinatorState, exchange: Exchange, now: float, limits: Timeouts
    ) -> list[Straggler]:
        voters = state.voters(exchange)
        absent = list(dict.fromkeys(site for site, *_ in exchange.waiting_for(voters)))
        there = [site for site in dict.fromkeys(v[0] for v in voters) if site not in absent]
        voted = self._voted.get(exchange.key, {})
        if exchange.key not in self._began or not absent or len(absent) > len(there):
            return []
        if exchange.averaging is not None and not exchange.done:
            return []
        last = max((voted[site] for site in there if site in voted), default=now)
        took = max(0.0, last - self._began[exchange.key][1])
        late = []
        for site in absent:
            known = self._took.get(site)
            usual = median(known) if known else None
            least = limits.rejoin if usual is None else limits.stall
            if now - last > least + FACTOR * max(took, usual or 0.0):
                late.append(site)
        active = [site for site in state.with_role("active") if site not in late]
        donors = [site for site in state.staying(state.next_round) if site not in absent]
        if not late or not donors or len(active) < state.config.outer.min_sites:
            return []
        reason = f"the others waited {now - last:.0f} s for its vote on {exchange.key}"
        return [(s, state.sites[s].incarnation, donors[0], reason) for s in late]
