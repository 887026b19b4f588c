"""Judges the claim `base`: the base model here is the one on which the sites trained adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dilocox.errors import ModelError, RecordError
from dilocox.record.verify.acceptance_claims import accepted
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.verify.start_weights import folder_of_model


def judge_base(
    course: RunHistory, folder: Path | None, progress: Callable[[str, float], None]
) -> str:
    """Compare the digest of the base model here with the digest that every site has signed.

    Args:
        course: history of the run.
        folder: folder that the reader knows to be `model.path`; None: what this machine has of
            that name.
        progress: called with an activity and the share of it that is done.

    Returns what was compared. Raises `RecordError` (FAIL), `NotRunError`.
    """
    from dilocox.models.base_weights import base_digest

    said = {str(each["base"]) for each in course.enrolments if "base" in each}
    said |= {each.facts.base for each in course.acceptances if each.facts.base is not None}
    lacking = [each.site for each in course.acceptances if each.facts.base is None]
    if lacking or not said:
        who = f"{lacking[0]} has" if lacking else "no site has"
        raise RecordError(f"{who} not said on which base model it trained adapters")
    if len(said) > 1:
        named = " and ".join(f"{each[:12]}…" for each in sorted(said))
        raise RecordError(f"sites trained adapters on different base models: {named}")
    (signed,) = said
    place, _ = folder_of_model(course.config["model"], folder)
    try:
        here = base_digest(place, lambda share: progress("reading the base model", share))
    except ModelError as error:
        raise NotRunError(str(error)) from None
    if here != signed:
        raise RecordError(
            f"{place}: digest {here[:12]}…, but the sites trained adapters on {signed[:12]}…; name "
            "the folder of that base model with --start"
        )
    return f"digest {here[:12]}…, {accepted(course, 'which base model it was')}"
