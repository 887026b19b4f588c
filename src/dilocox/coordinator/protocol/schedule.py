"""When fragments reach their boundaries and land: slot ends, counted in whole numbers.

A tick is the number of slots that have ended since the run began. A fragment's boundary is at
the end of one slot of every round; what it sent lands `delay` slots later by the plan of the round
of the boundary, which may be in the next round.
"""

from __future__ import annotations

from dilocox.errors import ConfigError

AT_ONCE = 2
"""Exchanges of a rank that may be under way: one whose first payloads travel, and one that is being
encoded before that, or voted on and decoded after it."""


def boundary_slots(stage: int, stages: int, fragments: int, slots: int) -> list[int]:
    """Slot, 1 to `slots`, at whose end each fragment of `stage` has its boundary.

    The boundaries of all fragments of all stages are spread evenly over the round, because the
    stages of a site share its uplink: fragment after fragment, and stage after stage for each.
    The very last one is at the round's end. Raises `ConfigError` for numbers out of range.
    """
    if not 0 <= stage < stages or fragments < 1 or slots < 1:
        raise ConfigError(
            f"no boundaries for stage {stage} of {stages}, {fragments} fragments and {slots} slots"
        )
    count = fragments * stages
    return [-(-(number * stages + stage + 1) * slots // count) for number in range(fragments)]


def all_boundary_slots(stages: int, fragments: int, slots: int) -> set[int]:
    """`boundary_slots` of every stage."""
    return {
        slot for stage in range(stages) for slot in boundary_slots(stage, stages, fragments, slots)
    }
