"""Decides a round from the sites' measurements: first the sites' paces, then the settings.

Pure: the coordinator and the planner's simulation use the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller import link_policy, rank_policy
from dilocox.coordinator.controller.candidates import Menu
from dilocox.coordinator.controller.choice import Choice, as_the_run_file_says
from dilocox.coordinator.controller.link_estimator import Estimate, Sample, declared, estimated
from dilocox.coordinator.controller.pace import (
    declared_paces,
    measured_paces,
    middle,
    rounds_looked_at,
)
from dilocox.coordinator.protocol.step_share import FULL

LOOK_BACK = 2
"""The plan of round t may use measurements up to round t - 2: all sites have finished that round by
then, so no site waits for others."""

Measurements = Mapping[int, Mapping[str, Sample]]
"""Samples by round and site. Steps are the site's own: a slow site has longer and fewer steps."""


@dataclass(frozen=True)
class Decided:
    """Settings of the round before."""

    inner_steps: int
    codec: str
    fragments: int
    paces: Mapping[str, int]
    estimate: Estimate | None


def decide(
    config: RunConfig,
    menu: Menu,
    round_: int,
    members: Sequence[str],
    measured: Measurements,
    ranks: Sequence[int],
    before: Decided | None,
    taken: int = 0,
) -> tuple[dict[str, int], Choice, Estimate | None]:
    """Return paces, settings and link estimate for a round.

    Args:
        config: The run file.
        menu: Payload sizes by codec; needed with `control.adapt = "link"`.
        round_: Number of the round.
        members: Sites of the round.
        measured: Measurements of earlier rounds.
        ranks: Effective ranks of earlier rounds in thousandths, oldest first; needed with
            `control.adapt = "effective-rank"`.
        before: Settings of the round before; None for the first.
        taken: Inner steps before a handover.

    Returns:
        Paces by site (`dilocox.coordinator.controller.pace`), the choice, and the estimate behind
        it. The estimate is None if the controller does not adapt to the link, or knows nothing.
    """
    paces = _paces(config, round_, members, measured, before)
    if config.control.adapt == "off":
        return paces, as_the_run_file_says(config), None
    if config.control.adapt == "effective-rank":
        return paces, rank_policy.choose(config, ranks), None
    estimate = declared(config.control) or estimated(
        None if before is None else before.estimate,
        _samples(measured, round_ - LOOK_BACK, paces),
        config.control,
        earlier=_samples(measured, round_ - LOOK_BACK - 1, paces),
    )
    if estimate is not None:
        steps = [estimate.step_us * FULL // pace for pace in paces.values()]
        estimate = replace(estimate, lag_us=max(steps) - min(steps))
    now = None if before is None else (before.inner_steps, before.codec, before.fragments)
    return paces, link_policy.choose(config, menu, estimate, len(paces), now, taken), estimate


def _paces(
    config: RunConfig,
    round_: int,
    members: Sequence[str],
    measured: Measurements,
    before: Decided | None,
) -> dict[str, int]:
    if config.control.steps == "equal":
        return dict.fromkeys(members, FULL)
    if config.declares_speeds:
        return declared_paces({site: config.sites[site].speed or 1.0 for site in members})
    known = [number for number in sorted(measured) if number <= round_ - LOOK_BACK]
    times = {
        site: [measured[n][site].step_us for n in known if site in measured[n]] for site in members
    }
    in_force = {} if before is None else before.paces
    if before is None or not known:
        return measured_paces(times, in_force, most=config.control.max_speed)
    latest = [own.step_us for own in measured[known[-1]].values()]
    rounds = rounds_looked_at(before.inner_steps, middle(latest) if latest else 1)
    return measured_paces(times, in_force, rounds, config.control.max_speed)


def _samples(measured: Measurements, round_: int, paces: Mapping[str, int]) -> list[Sample]:
    """Return the members' samples of a round, with step times scaled to the typical site."""
    return [
        replace(own, step_us=max(1, own.step_us * paces[site] // FULL))
        for site, own in measured.get(round_, {}).items()
        if site in paces
    ]
