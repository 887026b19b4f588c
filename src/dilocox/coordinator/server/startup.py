"""How a run starts, anew or from a checkpoint: who begins it, and who enters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.state import CoordinatorState


@dataclass(frozen=True)
class EarlierRun:
    """The run that this one goes on from, by `model.handover`."""

    name: str
    steps: int
    """Inner steps that its fastest site had taken."""
    ledger: dict[str, Any]
    """Its token ranges, as `Ledger.to_json` gives them."""


def goes_on(state: CoordinatorState, site: str) -> bool:
    """`site` has, as far as is known, all of its part of the checkpoint that the run goes on from,
    and goes on where that lies. True of nobody where the run begins anew."""
    found, plan = state.checkpoint, state.plans.get(state.first_round)
    if found is None or state.sites[site].lacks or (plan and site not in plan.members):
        return False
    return all((site, *rank) in found.written for rank in state.ranks)


def starts(state: CoordinatorState, site: str) -> bool:
    """`site` may be one of those that begin.

    Where the run goes on from a checkpoint, one without its part of it enters once the others are
    under way: it could fetch a state before, but not the exchanges that are still to land on it.
    Methods that exchange gradients take in nobody then, so there all begin.
    """
    anew = state.checkpoint is None or state.config.exchanges_gradients
    return anew or goes_on(state, site)


def entry_round(state: CoordinatorState) -> int:
    """First round none of whose exchanges was begun without a site that enters now."""
    begun = max((item.round for item in state.exchanges.values()), default=state.first_round - 1)
    # Exchanges of the checkpoint's round and before are in the checkpoint: they need not have been
    # begun again yet, or are over.
    held = state.checkpoint is not None and not state.config.exchanges_gradients
    return max(begun, state.first_round - 1 + held) + 1


def entered(state: CoordinatorState, site: str, time: float) -> e.Entered | None:
    """The entry of an enrolled site all of whose ranks are there, if it may enter now."""
    starting = state.phase == "starting" and starts(state, site)
    if state.sites[site].role != "enrolled" or not (state.running or starting):
        return None
    donor = state.donor_for(site) or state.founder
    if donor is None:
        return None
    # Who goes on from a checkpoint has to be there when the others go on.
    return e.Entered(time, site, donor, entry_round(state), starting and goes_on(state, site))


def lacking(
    state: CoordinatorState, site: str, round_: int, time: float
) -> e.CheckpointMissing | None:
    """What follows if an entering site asks for the plan of `round_` while the run starts.

    Who has taken up its checkpoint asks for the round in which that lies; who has found none
    follows the rounds from its `from_round` on.
    """
    own = state.sites[site]
    if state.phase != "starting" or not goes_on(state, site) or state.config.exchanges_gradients:
        return None
    if own.role != "entering" or own.donor is None or round_ <= state.first_round:
        return None
    return None if state.is_ready(site) else e.CheckpointMissing(time, site)


def begun(state: CoordinatorState, wait_for: int, time: float) -> e.Event | None:
    """The next event of a start, or the entry of who is ready while the run goes on; or none."""
    if state.phase == "enrolling":
        enrolled = state.with_role("enrolled")
        if len(enrolled) < wait_for:
            return None
        sites = [name for name in enrolled if starts(state, name)] or enrolled
        return e.Started(time, sites, sites[0], entry_round(state))
    ready = [name for name in state.with_role("entering") if state.is_ready(name)]
    if state.phase == "starting":
        if _stranded(state):
            return e.StartupRestarted(time, state.with_role("entering"))
        late = [name for name in state.live if name not in ready and not starts(state, name)]
        enough = len(ready) + len(late) >= state.config.outer.min_sites
        if not enough or not all(name in ready for name in state.starters):
            return None
    if ready and (state.phase == "starting" or state.running):
        rounds = {name: _first_round(state, name) for name in ready}
        since = {name: _since(state, name, round_) for name, round_ in rounds.items()}
        return e.Activated(time, rounds, since)
    return None


def _stranded(state: CoordinatorState) -> bool:
    """The sites that are there cannot start, whoever comes.

    Nobody is left to take theta_0 from; or too few are, and the method lets nobody in.
    """
    left = len(state.starters)
    least = state.config.outer.min_sites if state.config.exchanges_gradients else 1
    return bool(state.live) and left < max(1, least)


def _first_round(state: CoordinatorState, name: str) -> int:
    """The first round without a plan; of who goes on from a checkpoint, the round of that."""
    plan = state.plans.get(state.first_round)
    begins = state.phase == "starting" and starts(state, name)
    return state.first_round if begins and plan and name in plan.members else state.next_round


def _since(state: CoordinatorState, name: str, round_: int) -> int:
    """First round whose exchanges are the site's: those of recorded rounds that are in flight are,
    if it has them from its checkpoint."""
    if state.phase == "starting" and goes_on(state, name):
        while round_ - 1 in state.plans and name in state.plans[round_ - 1].members:
            round_ -= 1
    return round_
