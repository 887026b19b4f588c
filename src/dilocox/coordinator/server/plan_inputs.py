"""Asks the controller: from a state to what is chosen for a round."""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.config.codec_spec import sent_with_moments
from dilocox.coordinator.controller import rank_policy
from dilocox.coordinator.controller.candidates import Menu
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.decide import LOOK_BACK, Decided, Measurements, decide
from dilocox.coordinator.controller.link_estimator import Estimate, Sample
from dilocox.coordinator.protocol.messages import LinkEstimate
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.errors import TrainingError


def decided(
    state: CoordinatorState, round_: int, members: Sequence[str]
) -> tuple[dict[str, int], Choice, LinkEstimate | None]:
    """How fast `members` go in `round_`, as paces (`dilocox.coordinator.controller.pace`); what is
    chosen for it; and the estimate that it was chosen by."""
    plan, before = state.plans.get(round_ - 1), None
    if plan is not None:
        known = None if plan.estimate is None else Estimate(**plan.estimate.model_dump())
        paces = {site: own.pace for site, own in plan.members.items()}
        codec = _codec(state, round_ - 1)
        before = Decided(plan.inner_steps, codec, plan.fragments, paces, known)
    measured, ranks = _measured(state), _ranks(state, round_)
    paces, choice, estimate = decide(
        state.config,
        state.payloads or {},
        round_,
        members,
        measured,
        ranks,
        before,
        taken=state.steps_before or 0,
    )
    return paces, choice, None if estimate is None else LinkEstimate(**vars(estimate))


def sizes_to_log(known: Menu | None, given: Menu | None) -> dict[str, list[list[int]]] | None:
    """Sizes of payloads, in bytes by codec, stage and piece, that a coordinator which adapts to
    the link has to log beyond those that its log has: when a run begins, and when it goes on with a
    version whose controller knows more codecs. None if there are none.

    `given`: of all codecs that the controller may choose. Raises `TrainingError` if both are None.
    """
    if known is None and given is None:
        raise TrainingError(
            'control.adapt "link": the coordinator was not told the sizes of payloads; '
            'start it with them, or set adapt = "off"'
        )
    if given is None or (known is not None and given.keys() <= known.keys()):
        return None
    # The plan in force may have a codec that is no more on the menu.
    return {name: [list(row) for row in rows] for name, rows in {**(known or {}), **given}.items()}


def _measured(state: CoordinatorState) -> Measurements:
    found = {}
    for round_, sites in state.measured.items():
        codec, plan = _codec(state, round_), state.plans.get(round_)
        fragments = 0 if plan is None else plan.fragments
        found[round_] = {
            site: Sample(
                **own.model_dump(exclude={"effective_rank_milli"}), codec=codec, fragments=fragments
            )
            for site, own in sites.items()
        }
    return found


def _codec(state: CoordinatorState, round_: int) -> str:
    """Of a round's plan, as the controller calls it; empty if that is no more remembered."""
    plan = state.plans.get(round_)
    return "" if plan is None else sent_with_moments(plan.codec, moments=False)


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
            found.append(rank_policy.settled_rank_milli(sites))
    return found
