"""Texts for the lines of claims: counts of contributions, commitments and signers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dilocox.errors import RecordError
from dilocox.record.log.state_statements import readable
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.run_history import RunHistory

_NAMED = 3
"""Maximum number of items that a line names; further items are only counted."""


@readable
def told_complete(course: RunHistory) -> str:
    """Return a line on how much of the planned run was done, and which contributions count."""
    rounds = {step.key.round: step for step in course.steps.values() if not step.flush}
    done = sum(int(step.said.get("inner_steps", 0)) for step in rounds.values())
    outer = course.config["outer"]
    planned = outer.get("steps") or (outer.get("rounds") or 0) * outer.get("inner_steps", 0)
    text = (
        f"{len({step.key.round for step in course.steps.values()})} rounds with the flush, "
        f"{done} of {planned} planned inner steps, {len(course.steps)} outer steps; "
        f"{told_sites(course)}"
    )
    if course.slots:
        word = "resume" if len(course.slots) == 1 else "resumes"
        text += f"; with {len(course.slots)} {word}, to slot {_some(map(str, course.slots))}"
    return text


def told_sites(course: RunHistory) -> str:
    """Return a phrase: by site, its counted contributions of all possible ones, with reasons."""
    could: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    reasons: dict[str, Counter[str]] = {}
    few = 0
    for step in course.steps.values():
        members = _members(step)
        few += 2 * len(step.set) < len(members)
        for site in members:
            could[site] += 1
            if site in step.set:
                counted[site] += 1
            else:
                reasons.setdefault(site, Counter())[_reason(step, site)] += 1
    told = []
    for site in sorted(could):
        why = ", ".join(
            f"{number} {code}" for code, number in sorted(reasons.get(site, {}).items())
        )
        told.append(f"{site} {counted[site]} of {could[site]}" + (f" ({why})" if why else ""))
    text = (
        f"{counted.total()} of {could.total()} contributions of the planned members count: "
        f"{', '.join(told)}"
    )
    return f"{text}; in {few} outer steps fewer than half of the members count" if few else text


def _members(step: Step) -> list[str]:
    return list(dict.fromkeys([*map(str, step.said.get("members", ())), *step.set]))


def _reason(step: Step, site: str) -> str:
    """Return the reason why a member does not count. There is no verdict on an absent member."""
    verdict = (step.said.get("verdicts") or {}).get(site) or {}
    code = str(verdict.get("code", "admitted"))
    return "absent or set aside" if code == "admitted" else code


@readable
def told_commitments(course: RunHistory) -> str:
    """Return a line on the commitments, and on those that sites changed after a resume.

    Raises `RecordError` if a recommitted contribution counts without a flag in a run that compares
    contributions.
    """
    counted = sum(len(step.payloads) for step in course.steps.values())
    text = f"{counted} payloads, each committed to before the first vote in the coordinator's order"
    again: dict[str, list[str]] = {}
    for key, site, _ in sorted(course.recommitments.found):
        step = course.steps.get(key)
        if step is not None and key not in again.get(site, ()):
            again.setdefault(site, []).append(key)
            _check_flagged(course, step, site)
    if not again:
        return text
    named = "; ".join(f"{site} to {_some(keys)}" for site, keys in again.items())
    return f"{text}; recommitted after a resume, when the site could know the others': {named}"


def _check_flagged(course: RunHistory, step: Step, site: str) -> None:
    admission = course.config.get("admission", {})
    robust = admission.get("gate") or admission.get("aggregation", "mean") != "mean"
    verdict = (step.said.get("verdicts") or {}).get(site) or {}
    # Coordinators of an older dilocox did not set this flag.
    if (
        robust
        and course.bound
        and site in step.set
        and "recommitted" not in verdict.get("flags", ())
    ):
        raise RecordError(f"{step.key.text}: {site} has committed anew after a resume, to another "
                          "contribution, and it counts without a flag")  # fmt: skip


@readable
def told_signers(course: RunHistory) -> str:
    """Return a line on the signers: number of sites, unusual keys, and statements not checked."""
    keys: dict[str, set[str]] = {}
    for each in course.enrolments:
        keys.setdefault(str(each["site"]), set()).add(str(each["key"]))
    several = [f"{site} with {len(own)} keys" for site, own in sorted(keys.items()) if len(own) > 1]
    text = f"{course.read} statements by the coordinator and {len(keys)} sites"
    text += f" ({_some(several)})" if several else ""
    by_key: dict[str, list[str]] = {}
    for site, own in sorted(keys.items()):
        for key in own:
            by_key.setdefault(key, []).append(site)
    shared = sorted({tuple(sites) for sites in by_key.values() if len(sites) > 1})
    for sites in shared[:_NAMED]:
        text += f"; {' and '.join(sites)} have one key"
    if course.unknown:
        kinds = _some(kind[:60] for kind in sorted(course.unknown_types))
        text += f"; {course.unknown} of unknown types, not looked at: {kinds}"
    return text


def _some(texts: Iterable[str]) -> str:
    """Join the first few texts, and add the number of further ones."""
    found = list(texts)
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
