"""Asks the controller for a round's settings, from the measurements in the coordinator's state."""

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
    """Return the paces of `members` in `round_`, the controller's choice, and its estimate.

    `dilocox.coordinator.controller.pace` explains paces. The estimate is None if nothing was
    measured or declared.
    """
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
    """Return the payload sizes to log for a run with `control.adapt = "link"`, or None.

    Sizes are in bytes by codec, stage and piece. They are logged when a run begins, and again when
    a version whose controller knows more codecs continues the run. `known` has the logged sizes,
    `given` the sizes of all codecs that the controller may choose. Raises `TrainingError` if both
    are None.
    """
    if known is None and given is None:
        raise TrainingError(
            'control.adapt "link": the coordinator has no payload sizes; start it with them, or '
            'set adapt = "off"'
        )
    if given is None or (known is not None and given.keys() <= known.keys()):
        return None
    # The current plan may use a codec that the controller no longer offers, so its size stays.
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
    """Return the codec of a round's plan, as the controller names it; empty if it is unknown."""
    plan = state.plans.get(round_)
    return "" if plan is None else sent_with_moments(plan.codec, moments=False)


def _ranks(state: CoordinatorState, round_: int) -> list[int]:
    """Return the effective ranks, in thousandths, of the rounds that the plan of `round_` may use,
    oldest first."""
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
