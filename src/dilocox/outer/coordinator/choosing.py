"""Asks the controller: from a state to what is chosen for a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dilocox.outer.controller import by_rank, deciding
from dilocox.outer.controller.choice import Choice
from dilocox.outer.controller.deciding import LOOK_BACK, Decided, Measurements
from dilocox.outer.controller.link import Estimate, Sample
from dilocox.outer.coordinator.messages import LinkEstimate
from dilocox.outer.coordinator.state import CoordinatorState


def paces_of(state: CoordinatorState, round_: int, members: Sequence[str]) -> dict[str, int]:
    """How fast `members` go in `round_`, in thousandths of the fastest."""
    return deciding.paces_of(
        state.config, round_, members, _measured(state), _before(state, round_)
    )


def chosen(
    state: CoordinatorState, round_: int, paces: Mapping[str, int]
) -> tuple[Choice, LinkEstimate | None]:
    """What is chosen for `round_` of the members, which go at `paces`, and the estimate that it was
    chosen by."""
    choice, estimate = deciding.chosen(
        state.config,
        state.payloads or {},
        round_,
        paces,
        _measured(state),
        _ranks(state, round_),
        _before(state, round_),
    )
    return choice, None if estimate is None else LinkEstimate(**vars(estimate))


def _before(state: CoordinatorState, round_: int) -> Decided | None:
    plan = state.plans.get(round_ - 1)
    if plan is None:
        return None
    estimate = None if plan.estimate is None else Estimate(**plan.estimate.model_dump())
    paces = {site: own.pace for site, own in plan.members.items()}
    return Decided(plan.inner_steps, plan.codec, paces, estimate)


def _measured(state: CoordinatorState) -> Measurements:
    return {
        round_: {
            site: Sample(**own.model_dump(exclude={"effective_rank_milli"}))
            for site, own in sites.items()
        }
        for round_, sites in state.measured.items()
    }


def _ranks(state: CoordinatorState, round_: int) -> list[int]:
    """Effective ranks of the rounds that may be looked at, oldest first."""
    found = []
    for number in sorted(state.measured):
        sites = [
            own.effective_rank_milli
            for own in state.measured[number].values()
            if own.effective_rank_milli is not None
        ]
        if sites and number <= round_ - LOOK_BACK:
            found.append(by_rank.mean_rank_milli(sites))
    return found
