"""Judges which sites signed the run file, the data and the code of a record. Pure.

Without the sites' signatures these are the coordinator's word alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from dilocox.errors import DataError, RecordError
from dilocox.record.log.acceptance import Acceptance
from dilocox.record.log.state_statements import readable
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory


def counting(course: RunHistory) -> list[str]:
    """Return the sites with a contribution in the model or a signed state of it, sorted."""
    found = {site for step in course.steps.values() for site in step.set}
    return sorted(found | {state.site for state in course.states})


@readable
def accepted(course: RunHistory, what: str) -> str:
    """Check that every site whose contribution counts has signed the manifest.

    Returns a phrase for the line of a claim. Raises `RecordError` if an acceptance contradicts the
    manifest or the site's enrolment, or is missing. Raises `NotRunError` if `what` is the
    coordinator's word alone, as in records of an older dilocox.
    """
    for each in course.acceptances:
        _check(course, each)
    sites = counting(course)
    own = {each.site for each in course.acceptances}
    lacking = [site for site in sites if site not in own or site in course.unaccepted]
    if lacking and course.bound:
        raise RecordError(f"{names(lacking)} signed statements without the acceptance of the "
                          "manifest that comes first")  # fmt: skip
    if lacking or not course.bound:
        raise NotRunError(f"the coordinator's word: {what} is not signed by the sites (the record "
                          "was begun by an older dilocox)")  # fmt: skip
    return f"accepted by {names(sites)}"


def _check(course: RunHistory, found: Acceptance) -> None:
    if found.manifest != course.first:
        raise RecordError(f"{found.site} has accepted another manifest, {found.manifest[:12]}…")
    enrolment = next(
        (
            each
            for each in course.enrolments
            if (each["site"], each["incarnation"]) == (found.site, found.incarnation)
        ),
        {},
    )
    for name, own in (("key", found.key), ("versions", dict(found.facts.versions))):
        if enrolment.get(name) != own:
            raise RecordError(f"{found.site}'s acceptance names another {name} than its enrolment "
                              "by the coordinator")  # fmt: skip


@readable
def accepted_data(course: RunHistory, digest: str, folder: str) -> str:
    """Check that every site whose contribution counts has signed the token files in `folder`.

    `digest`: of these token files. Returns a phrase for the line of the claim. Raises `DataError`
    if the sites named other token files, and raises like `accepted`.
    """
    named = {str(each["data"]) for each in course.enrolments}
    own = {str(each.facts.data) for each in course.acceptances}
    shared = course.manifest.get("data")
    told = {str(shared["manifest"])} if shared else set()
    if (named | own | told) - {digest}:
        raise DataError(f"{folder}: digest {digest[:12]}…, the sites named others")
    text = f"digest {digest[:12]}…, {accepted(course, 'which token files it was')}"
    private = {each.site for each in course.acceptances if each.facts.own_data is not None}
    return f"{text}; not the own token files of {names(private)}" if private else text


@readable
def accepted_code(course: RunHistory) -> str:
    """Return a phrase on which sites signed that they ran the coordinator's code."""
    there = {each.site: each.facts.code for each in course.acceptances}
    if not there:
        return "which code the sites ran is not signed"
    theirs = str(course.manifest["code"])
    other = [site for site, code in there.items() if code != theirs]
    same = [site for site in there if site not in other]
    told = [f"{names(same)} signed the same"] if same else []
    if other:
        told.append(f"{names(other)} signed other code")
    return "; ".join(told)


def names(sites: Iterable[str]) -> str:
    """Join the names of sites, sorted."""
    return ", ".join(sorted(sites))
