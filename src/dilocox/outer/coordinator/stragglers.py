"""Which sites keep the others waiting for too long. Pure: time enters as an argument.

What counts is how long after all others a site is there for an exchange. It may be the grace,
and as long as a round takes it: so far apart are sites where all take the same number of steps. A
site that has not trained a whole round yet is waited for.
"""

from __future__ import annotations

from dilocox.outer.coordinator.arrivals import Arrivals
from dilocox.outer.coordinator.state import CoordinatorState

Straggler = tuple[str, int, str, str]
"""(site, incarnation, donor to enter from, reason in one line)."""


def overdue(
    state: CoordinatorState, arrivals: Arrivals, now: float, grace: float
) -> list[Straggler]:
    """Sites that the others go on without, at most those of one exchange. `grace` in seconds.

    Nobody where too few sites would be left, or where a method takes every step together.
    """
    if state.phase != "running" or state.config.exchanges_gradients:
        return []
    for key in state.undecided:
        exchange = state.exchanges[key]
        waiting = arrivals.awaited(key, state.voters(exchange))
        if waiting is None:
            continue
        since, absent = waiting
        late = [site for site in absent if _is_late(state, site, now - since - grace)]
        active = [site for site in state.with_role("active") if site not in late]
        donors = [site for site in state.staying(state.next_round) if site not in absent]
        if late and donors and len(active) >= state.config.outer.min_sites:
            reason = (
                f"the others waited {now - since:.0f} s for it at {key}; it enters again from "
                f"{donors[0]}"
            )
            return [(site, state.sites[site].incarnation, donors[0], reason) for site in late]
    return []


def _is_late(state: CoordinatorState, site: str, beyond: float) -> bool:
    """It is `beyond` seconds over the grace, and that is more than a round takes it."""
    own = state.sites[site]
    rounds = [round_ for round_, found in state.measured.items() if site in found]
    if own.rounds_done <= own.active_from or not rounds:
        return False
    latest = max(rounds)
    plan, measured = state.plans.get(latest), state.measured[latest][site]
    if plan is None or site not in plan.members:
        return False
    return beyond > plan.steps_of(site) * measured.step_us / 1e6
