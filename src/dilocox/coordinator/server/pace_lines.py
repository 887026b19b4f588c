"""Lines for people about how fast sites go. Pure."""

from __future__ import annotations

from dilocox.coordinator.protocol.round_plan import RoundPlan
from dilocox.coordinator.protocol.step_share import FULL


def changes(plan: RoundPlan, before: RoundPlan | None) -> list[str]:
    """Of whom `plan` expects half or twice what the plan `before` did, or twice what is typical."""
    known = {} if before is None else before.members
    lines = []
    for name, member in plan.members.items():
        old = known[name].pace if name in known else member.pace
        twice = old < 2 * FULL <= member.pace
        if twice or not old <= 2 * member.pace <= 4 * old:
            lines.append(
                f"{name} goes at {member.pace / 10:g} % of the typical site's speed from round "
                f"{plan.round} on, before at {old / 10:g} %, by what sites measure"
            )
    return lines
