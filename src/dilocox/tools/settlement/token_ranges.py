"""Rounds that cannot have been as the log says: a check of the coordinator's word by the run file.

The outer steps of a round, with their token ranges, are the coordinator's word. Right ranges do not
overlap, and a site reads at most its batch per inner step. A round has one exchange per stage and
fragment. All rounds together have no more inner steps than the run file plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from dilocox.record.log.step_statements import Step
from dilocox.record.verify.run_history import RunHistory


def impossible_rounds(course: RunHistory) -> set[int]:
    """Return the rounds with ranges that overlap in one space, or exceed the planned batch. Pure.

    Among them are rounds beyond the run file's inner steps, and rounds with an exchange of no stage
    of the run, or with two numbers of fragments: their parts would sum up to more than the round.
    """
    steps: dict[int, set[int]] = {}
    fragments: dict[int, set[int]] = {}
    found: set[int] = set()
    for step in course.steps.values():
        if step.flush:
            continue
        said = dict(step.said.items())
        fragments.setdefault(step.key.round, set()).add(step.fragments)
        try:
            steps.setdefault(step.key.round, set()).add(int(said["inner_steps"]))
            right = (
                _is_part(step, course.stages)
                and _names_all(step, said)
                and not _overlap(said)
                and not _exceeds(said, course.config)
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            right = False  # a malformed statement is no reason to pay
        if not right:
            found.add(step.key.round)
    found.update(number for number, own in fragments.items() if len(own) != 1)
    left = _planned_steps(course.config)
    for number, own in sorted(steps.items()):
        left -= max(own, default=0)
        if len(own) != 1 or min(own) < 1 or left < 0:
            found.add(number)
    return found


def _is_part(step: Step, stages: int) -> bool:
    """Return True if an outer step is of a stage and fragment that a round of the run has."""
    return step.key.kind == "outer" and step.key.stage < stages


def _names_all(step: Step, said: Mapping[str, Any]) -> bool:
    """Return True if each site of the contribution set has token ranges and a space."""
    return all(site in said["ranges"] and site in said["spaces"] for site in step.set)


def _overlap(said: Mapping[str, Any]) -> bool:
    """Return True if two ranges of an outer step share a sequence number of one space."""
    by_space: dict[str, list[tuple[int, int]]] = {}
    for site, ranges in said["ranges"].items():
        own = by_space.setdefault(str(said["spaces"][site]), [])
        own.extend((int(start), int(count)) for start, count in ranges if count)
    for each in by_space.values():
        each.sort()
        ends = itertools.pairwise(each)
        if any(start + count > after for (start, count), (after, _) in ends):
            return True
    return False


def _exceeds(said: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return True if a site has more sequences than batch times inner steps, or a negative count.

    With `outer.global_batch = "fixed"` the sites have the batch of all sites together.
    """
    counts = {site: [int(count) for _, count in ranges] for site, ranges in said["ranges"].items()}
    if min((count for own in counts.values() for count in own), default=0) < 0:
        return True
    steps = _most_steps(int(said["inner_steps"]), config)
    batches = {name: int(site.get("batch_size") or config["site"]["batch_size"])
               for name, site in config["sites"].items()}  # fmt: skip
    if config["outer"].get("global_batch") == "fixed":
        return sum(map(sum, counts.values())) > steps * sum(batches.values())
    return any(sum(own) > steps * batches.get(site, 0) for site, own in counts.items())


def _most_steps(steps: int, config: Mapping[str, Any]) -> int:
    """Return the most inner steps of the fastest site while the typical site takes `steps`."""
    control = config.get("control", {})
    if control.get("steps") != "by-speed":
        return steps
    speeds = [site.get("speed") for site in config["sites"].values()]
    if any(speeds):
        declared = [float(each or 1.0) for each in speeds]
        fastest = max(declared) / min(declared)
    else:
        fastest = float(control.get("max_speed", 8.0))
    # A site carries less than one step over from the round before.
    return int(steps * fastest) + 1


def _planned_steps(config: Mapping[str, Any]) -> int:
    """Return the inner steps that the run file plans for the typical site."""
    outer = config["outer"]
    return int(outer.get("steps") or (outer.get("rounds") or 0) * outer["inner_steps"])
