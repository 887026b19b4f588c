"""Chooses the list of a stage's final tensors, of all lists that sites have signed.

All sites sign the same root. A site may sign it with a list that is in no store, or that is the
list of another root. The lists of the other sites are used then.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError
from dilocox.record.log.digests import TensorDigest
from dilocox.record.verify.replay import Get, read_listing
from dilocox.record.verify.run_history import RunHistory


@dataclass(frozen=True)
class FinalList:
    """A usable list of a stage's final tensors."""

    listing: str
    """SHA-256 of the list in the store."""
    tensors: list[TensorDigest]
    others: list[str]
    """Sites that have signed the same root with another list, sorted."""


def final_list(
    course: RunHistory, stage: int, get: Get, *, published: bool = False
) -> FinalList | None:
    """Return the first usable list of a stage's final tensors; None if no site has signed one.

    Args:
        course: History of the run.
        stage: The stage.
        get: Returns an object of the stores by its SHA-256.
        published: Take the published form of the tensors, if it is not the state itself.

    Raises:
        MissingError: A list is in no store, and no other list is usable.
        RecordError: No list is usable; the message names the sites that have signed the first.
    """
    signed = [
        (state.site, *form)
        for state in course.state("final", stage)
        if (form := state.published if published else (state.root, state.listing)) is not None
    ]
    root = signed[-1][1] if signed else ""
    by_list: dict[str, set[str]] = {}
    for site, own, listing in signed:
        if own == root:
            by_list.setdefault(listing, set()).add(site)
    what, missing, bad = f"list of stage {stage}'s {_FORM[published]} tensors", "", ""
    for listing, sites in by_list.items():
        who = ", ".join(sorted(sites))
        try:
            tensors = read_listing(get, listing, root)
        except MissingError as error:
            missing = missing or f"{what}, signed by {who}: {error}"
        except RecordError as error:
            bad = bad or f"{what}, signed by {who}: {error}"
        else:
            others = {site for each, own in by_list.items() if each != listing for site in own}
            return FinalList(listing, tensors, sorted(others))
    if missing:
        raise MissingError(missing)
    if bad:
        raise RecordError(bad)
    return None


_FORM = {False: "final", True: "published"}


def published_list(course: RunHistory, stage: int, get: Get) -> FinalList | None:
    """Return the first usable list of a stage's tensors as they are published.

    None if no final state is signed. Raises like `final_list`.
    """
    form = any(state.published is not None for state in course.state("final", stage)[-1:])
    return final_list(course, stage, get, published=form)
