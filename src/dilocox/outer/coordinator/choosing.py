"""Asks the controller: from a state to what is chosen for a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dilocox.outer.controller import by_link, by_rank
from dilocox.outer.controller.choice import Choice, as_the_run_file_says
from dilocox.outer.controller.link import Estimate, Sample, declared, estimated
from dilocox.outer.controller.pace import (
    FULL,
    declared_paces,
    measured_paces,
    rounds_looked_at,
)
from dilocox.outer.coordinator.messages import LinkEstimate
from dilocox.outer.coordinator.state import CoordinatorState

LOOK_BACK = 2
"""The plan of round t may use what was measured up to round t - 2: all sites are through with it,
while none waits for the others."""


def paces_of(state: CoordinatorState, round_: int, members: Sequence[str]) -> dict[str, int]:
    """How fast `members` go in `round_`, in thousandths of the fastest."""
    config = state.config
    if config.control.steps == "equal":
        return dict.fromkeys(members, FULL)
    if config.declares_speeds:
        return declared_paces({site: config.sites[site].speed or 1.0 for site in members})
    before = state.plans.get(round_ - 1)
    known = [number for number in sorted(state.measured) if number <= round_ - LOOK_BACK]
    times = {
        site: [state.measured[n][site].step_us for n in known if site in state.measured[n]]
        for site in members
    }
    in_force = {} if before is None else {site: own.pace for site, own in before.members.items()}
    if before is None or not known:
        return measured_paces(times, in_force)
    fastest = min((own.step_us for own in state.measured[known[-1]].values()), default=1)
    return measured_paces(times, in_force, rounds_looked_at(before.inner_steps, fastest))


def chosen(
    state: CoordinatorState, round_: int, members: Sequence[str], paces: Mapping[str, int]
) -> tuple[Choice, LinkEstimate | None]:
    """What is chosen for `round_` of `members`, which go at `paces`, and the estimate that it was
    chosen by."""
    config = state.config
    if config.control.adapt == "off":
        return as_the_run_file_says(config), None
    if config.control.adapt == "effective-rank":
        return by_rank.choose(config, _ranks(state, round_)), None
    before = state.plans.get(round_ - 1)
    known = None if before is None or before.estimate is None else before.estimate.model_dump()
    estimate = declared(config.control) or estimated(
        None if known is None else Estimate(**known),
        _samples(state, round_ - LOOK_BACK, paces),
        config.control,
        earlier=_samples(state, round_ - LOOK_BACK - 1, paces),
    )
    if estimate is not None:
        slowest = min(paces.values())
        estimate = replace(estimate, lag_us=estimate.step_us * (FULL - slowest) // slowest)
    now = None if before is None else (before.inner_steps, before.codec)
    choice = by_link.choose(config, state.payloads or {}, estimate, len(members), now)
    return choice, None if estimate is None else LinkEstimate(**vars(estimate))


def _samples(state: CoordinatorState, round_: int, paces: Mapping[str, int]) -> list[Sample]:
    """What members measured in a round. Steps are the fastest site's: a site's own are longer and
    fewer."""
    return [
        Sample(
            **own.model_dump(exclude={"effective_rank_milli", "step_us"}),
            step_us=max(1, own.step_us * paces[site] // FULL),
        )
        for site, own in state.measured.get(round_, {}).items()
        if site in paces
    ]


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
