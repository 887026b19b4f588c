"""The slots at whose ends fragments have their boundaries.

A tick is the number of slots that have ended since the run began. A fragment has its boundary at
the end of one slot of every round. The contribution taken there lands `delay` slots later, possibly
in the next round; `delay` is that of the plan of the boundary's round.
"""

from __future__ import annotations

from dilocox.errors import ConfigError

AT_ONCE = 2
"""Number of exchanges of a rank that may be in flight at the same time. One exchange transfers its
first payloads. The other is encoded before its transfer, or is voted on and decoded afterwards."""


def boundary_slots(stage: int, stages: int, fragments: int, slots: int) -> list[int]:
    """Return, per fragment of `stage`, the slot (1 to `slots`) at whose end its boundary is.

    The boundaries of all fragments of all stages are spread evenly over the round, because the
    stages of a site share its uplink. Boundaries are ordered by fragment, then by stage. The last
    boundary is at the end of the round. Raises `ConfigError` if a number is out of range.
    """
    if not 0 <= stage < stages or fragments < 1 or slots < 1:
        raise ConfigError(
            f"no boundaries for stage {stage} of {stages}, {fragments} fragments and {slots} slots"
        )
    count = fragments * stages
    return [-(-(number * stages + stage + 1) * slots // count) for number in range(fragments)]


def all_boundary_slots(stages: int, fragments: int, slots: int) -> set[int]:
    """Return the slots that `boundary_slots` gives for any stage."""
    return {
        slot for stage in range(stages) for slot in boundary_slots(stage, stages, fragments, slots)
    }
