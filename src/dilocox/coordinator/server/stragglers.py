"""Which sites keep the others waiting for too long. Pure: time is an argument.

A site may arrive at an exchange later than all others, by at most the grace plus the time of its
own round. Sites can be this far apart if all take the same number of steps. A site itself reports
the time of its round, so the times of the others bound the reported time. Sites are overtaken
(`events.Overtaken`) only if at least as many sites wait as are missing, so a few early sites cannot
exclude the rest.
"""

from __future__ import annotations

from statistics import median_low

from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server.arrivals import Arrivals
from dilocox.coordinator.server.state import CoordinatorState

Straggler = tuple[str, int, str, str]
"""(site, incarnation, donor to enter from, reason in one line)."""
SLOWEST = 10.0
"""A site may be late by at most this many median rounds of the others, whatever it claims."""


def overdue(
    state: CoordinatorState, arrivals: Arrivals, now: float, limits: Timeouts
) -> list[Straggler]:
    """Return the sites of one exchange without which the others go on; usually none.

    None are returned if too few sites would be left, if more sites are missing than wait, or if the
    method exchanges gradients.
    """
    if state.phase != "running" or state.config.exchanges_gradients:
        return []
    for key in state.undecided:
        exchange = state.exchanges[key]
        voters = state.voters(exchange)
        waiting = arrivals.awaited(key, voters)
        if waiting is None:
            continue
        since, absent = waiting
        waits = dict.fromkeys(site for site, _, _ in voters if site not in absent)
        # A site that, by its reports, is still in an earlier round does not wait yet.
        there = [site for site in waits if state.sites[site].rounds_done >= exchange.round]
        if len(absent) > len(there):
            continue
        beyond = now - since - limits.grace
        late = [site for site in absent if beyond > _allowed(state, site, exchange.round, limits)]
        active = [site for site in state.with_role("active") if site not in late]
        donors = [site for site in state.staying(state.next_round) if site not in absent]
        if late and donors and len(active) >= state.config.outer.min_sites:
            reason = (
                f"the others waited {now - since:.0f} s for it at {key}; it enters again from "
                f"{donors[0]}"
            )
            return [(site, state.sites[site].incarnation, donors[0], reason) for site in late]
    return []


def _allowed(state: CoordinatorState, site: str, round_: int, limits: Timeouts) -> float:
    """Return how long, beyond the grace, the others wait for a site at an exchange of `round_`.

    The result is in seconds: the site's time per round for every round that it still has to train.
    Without measurements of the site, the median of the others counts. In a site's first round, in
    which code is compiled, the result is `limits.stall` plus `SLOWEST` median rounds of the others.
    """
    own = state.sites[site]
    active = state.with_role("active")
    known = {name: found for name in active if (found := _round_seconds(state, name)) is not None}
    others = [seconds for name, seconds in known.items() if name != site]
    middle = median_low(others) if others else None
    if own.rounds_done <= own.active_from or (middle is None and site not in known):
        return limits.stall + SLOWEST * (middle or 0.0)
    seconds = known.get(site, middle or 0.0)
    if middle is not None and len(others) > 1:
        seconds = min(seconds, SLOWEST * middle + limits.link)
    return seconds * max(1, round_ - own.rounds_done + 1)


def _round_seconds(state: CoordinatorState, site: str) -> float | None:
    """Return the seconds of a site's latest measured round, by its own claim; None: not known."""
    rounds = [round_ for round_, found in state.measured.items() if site in found]
    if not rounds:
        return None
    plan, measured = state.plans.get(max(rounds)), state.measured[max(rounds)][site]
    if plan is None or site not in plan.members:
        return None
    return plan.steps_of(site) * measured.step_us / 1e6
