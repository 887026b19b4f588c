"""How a run starts, from theta_0 or from a checkpoint: which sites begin and which enter.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dilocox.coordinator.controller.candidates import Menu
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.standby import StandbyLink
from dilocox.coordinator.server.state import CoordinatorState


@dataclass(frozen=True)
class EarlierRun:
    """The earlier run that this run continues (`model.handover`)."""

    name: str
    steps: int
    """Inner steps that the earlier run's fastest site had taken."""
    ledger: dict[str, Any]
    """Token ranges of the earlier run, in the form of `Ledger.to_json`."""


@dataclass(frozen=True)
class RunStart:
    """The facts that a coordinator needs to start a run, beside the run file."""

    wait_for: int | None = None
    """Number of sites that the run starts with; None: all of the run file."""
    payloads: Menu | None = None
    """Bytes by codec, stage and piece (`dilocox.training.payload_sizes`). A new run with
    `control.adapt = "link"` needs them."""
    earlier: Callable[[], EarlierRun] | None = None
    """Reads the earlier run that a new run with `model.handover` continues."""
    standby: StandbyLink | None = None
    """Copies the run's files to a standby that asks for them; None: no standby may ask."""


def goes_on(state: CoordinatorState, site: str) -> bool:
    """Return whether `site` continues from its own part of the checkpoint that the run resumes.

    The part must be complete as far as the coordinator knows. False if the run does not resume.
    """
    found, plan = state.checkpoint, state.plans.get(state.first_round)
    if found is None or state.sites[site].lacks or (plan and site not in plan.members):
        return False
    return all((site, *rank) in found.written for rank in state.ranks)


def starts(state: CoordinatorState, site: str) -> bool:
    """Return whether `site` may be one of the sites that start the run.

    When the run resumes from a checkpoint, a site without its part enters after the start. Before
    the start it could fetch a state, but not the exchanges in flight that still land on it. Methods
    that exchange gradients let no site enter later, so with them every site may start.
    """
    anew = state.checkpoint is None or state.config.exchanges_gradients
    return anew or goes_on(state, site)


def entry_round(state: CoordinatorState) -> int:
    """Return the first round in which no exchange has begun without a site that enters now."""
    begun = max((item.round for item in state.exchanges.values()), default=state.first_round - 1)
    # Exchanges of the checkpoint's round and before are part of the checkpoint. Some are over.
    # Others are in flight, although nothing in the state says yet that they have begun.
    held = state.checkpoint is not None and not state.config.exchanges_gradients
    return max(begun, state.first_round - 1 + held) + 1


def entered(state: CoordinatorState, site: str, time: float) -> e.Entered | None:
    """Return the event with which an enrolled site enters, or None if it may not enter yet.

    Call it only when all ranks of the site have sent a beat.
    """
    starting = state.phase == "starting" and starts(state, site)
    if state.sites[site].role != "enrolled" or not (state.running or starting):
        return None
    donor = state.donor_for(site) or state.founder
    if donor is None:
        return None
    # The start waits for a site that continues from its checkpoint.
    return e.Entered(time, site, donor, entry_round(state), starting and goes_on(state, site))


def lacking(
    state: CoordinatorState, site: str, round_: int, time: float
) -> e.CheckpointMissing | None:
    """Return the event that says that an entering site lacks its checkpoint, or None.

    Call it when the site asks for the plan of `round_` while the run starts. A site that loaded its
    checkpoint asks for the checkpoint's round. A later round shows that it found no checkpoint and
    follows the rounds from its `from_round` on.
    """
    own = state.sites[site]
    if state.phase != "starting" or not goes_on(state, site) or state.config.exchanges_gradients:
        return None
    if own.role != "entering" or own.donor is None or round_ <= state.first_round:
        return None
    return None if state.is_ready(site) else e.CheckpointMissing(time, site)


def begun(state: CoordinatorState, wait_for: int, time: float) -> e.Event | None:
    """Return the next event of the start, or the activation of sites that are ready, or None.

    `wait_for` is the number of enrolled sites that the start needs; `time` stamps the event.
    """
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
    """Return whether the start must begin again, because the sites that are left cannot start.

    Either no site is left that has theta_0, or too few are left and the method lets none enter.
    """
    left = len(state.starters)
    least = state.config.outer.min_sites if state.config.exchanges_gradients else 1
    return bool(state.live) and left < max(1, least)


def _first_round(state: CoordinatorState, name: str) -> int:
    """Return the checkpoint's round for a site that resumes, else the first unplanned round."""
    plan = state.plans.get(state.first_round)
    begins = state.phase == "starting" and starts(state, name)
    return state.first_round if begins and plan and name in plan.members else state.next_round


def _since(state: CoordinatorState, name: str, round_: int) -> int:
    """Return the first round in whose exchanges the site takes part.

    A site with a checkpoint has the exchanges of recorded rounds that are still in flight, too.
    """
    if state.phase == "starting" and goes_on(state, name):
        while round_ - 1 in state.plans and name in state.plans[round_ - 1].members:
            round_ -= 1
    return round_
