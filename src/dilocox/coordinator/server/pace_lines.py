"""Messages for people about changes of the sites' paces. Pure."""

from __future__ import annotations

from dilocox.coordinator.protocol.round_plan import RoundPlan
from dilocox.coordinator.protocol.step_share import FULL


def changes(plan: RoundPlan, before: RoundPlan | None) -> list[str]:
    """Return a message for each site with a large change of pace since the plan `before`.

    A change is large if the pace more than doubles or halves, or reaches twice the typical pace.
    """
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
