"""Which sites keep the others waiting for too long. Pure: time enters as an argument.

What counts is how long after all others a site is there for an exchange. It may be the grace,
and as long as a round takes it: so far apart are sites where all take the same number of steps.
How long a round takes a site is its own word, so the others' bound it. Those who wait are never
fewer than those waited for: a few that are early do not set the run aside.
"""

from __future__ import annotations

from statistics import median_low

from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server.arrivals import Arrivals
from dilocox.coordinator.server.state import CoordinatorState

Straggler = tuple[str, int, str, str]
"""(site, incarnation, donor to enter from, reason in one line)."""
SLOWEST = 10.0
"""A site may be late by so many times the others' median round, whatever it says of itself."""


def overdue(
    state: CoordinatorState, arrivals: Arrivals, now: float, limits: Timeouts
) -> list[Straggler]:
    """Sites that the others go on without, at most those of one exchange.

    Nobody where too few sites would be left, where more are waited for than wait, or where a method
    takes every step together.
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
        # By its own account a site may be in an earlier round still: then it waits for nobody yet.
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
    """Seconds beyond the grace that the others wait for a site at an exchange of `round_`.

    A round as it takes the site, for every round that it has still to train until it is there. A
    site that says nothing of that has the others' median. Its first round may take longer: what it
    runs is compiled in it.
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
    """What the latest round took a site that has said so, as it says; None if that is not known."""
    rounds = [round_ for round_, found in state.measured.items() if site in found]
    if not rounds:
        return None
    plan, measured = state.plans.get(max(rounds)), state.measured[max(rounds)][site]
    if plan is None or site not in plan.members:
        return None
    return plan.steps_of(site) * measured.step_us / 1e6
