"""What a site may report of a round: the kinds there are, and the fields that each has.

A report is its site's word: nothing in it says who reports, of which round, or when. What is made
from reports relies on their fields, so a report without them is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dilocox.utils.plain_text import plain

JOURNALS = "site-*.jsonl"
"""In a site's run folder: what it has done so far, for `dilocox status`."""
KINDS = ("round", "flush", "evaluation", "first_evaluation", "peer_evaluation", "warning")
RESERVED = ("kind", "round", "site", "time", "about")
"""Fields of a line of `metrics.jsonl` that its writer sets."""
_ROUND = (
    "step", "tokens", "seconds", "tokens_per_second", "wait_share", "payload_bytes",
    "allreduce_bytes", "ratio_per_transfer", "members",
)  # fmt: skip
_NUMBERS: Mapping[str, tuple[str, ...]] = {"round": _ROUND, "flush": _ROUND}
"""Finite numbers from 0 on that a report of this kind has."""
_DEVICES = ("mfu", "peak_flops", "peak_memory_bytes", "peak_reserved_bytes", "allocation_retries")
"""The same, where a report has them."""
_LONGEST, _MOST, _LARGEST = 500, 4096, 2**63


def checked(kind: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a report that may be written down. Raises ValueError for one without those that
    its kind has."""
    if kind not in KINDS:
        raise ValueError(f"there is no report of the kind {plain(str(kind))[:32]}")
    found = {
        key: value
        for key, own in metrics.items()
        if key not in RESERVED and (value := _value(own)) is not Ellipsis
    }
    for key in _NUMBERS.get(kind, ()):
        _need(_counts(found.get(key)), key)
    for key in _DEVICES:
        _need(key not in found or _counts(found[key]), key)
    if kind in _NUMBERS:
        found.setdefault("anchor_digest", None)
        _need(isinstance(metrics.get("anchor_digest"), str | None), "anchor_digest")
        _need("loss" not in found or _is_number(found["loss"]), "loss")
        _need(isinstance(found.get("waited_for", {}), dict), "waited_for")
        _need(isinstance(found.get("dropped", ""), str), "dropped")
    elif kind == "warning":
        _need(isinstance(found.get("text"), str), "text")
    else:
        _need(_is_number(found.get("val_loss")), "val_loss")
        after = found.get("after_round")
        _need(
            isinstance(after, int) and (after == -1) == (kind == "first_evaluation"), "after_round"
        )
    return found


def settled_anchor(
    reports: Mapping[str, Mapping[str, Any]], members: int
) -> tuple[str | None, list[str]] | None:
    """(anchor digest of a round, sites that report another one), by majority; None without one.

    `members`: sites that are to report. A site without a digest, since the others have gone on
    without it, has no say. As long as reports are missing, a majority is one of all members.
    """
    known = {site: own["anchor_digest"] for site, own in reports.items() if own["anchor_digest"]}
    if not known:
        return None, []
    digest, count = Counter(known.values()).most_common(1)[0]
    odd = [site for site, other in known.items() if other != digest]
    if odd and 2 * count <= max(len(known), members if len(reports) < members else 0):
        return None
    return digest, odd


def _need(there: bool, key: str) -> None:
    if not there:
        raise ValueError(f"{key} is missing, or is not what a report of this kind has there")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _counts(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0


def _value(own: object) -> Any:
    """A number, a short plain text, or numbers by name; Ellipsis for anything else."""
    if own is None or isinstance(own, bool | float):
        return own
    if isinstance(own, int):
        return own if abs(own) < _LARGEST else ...
    if isinstance(own, str):
        return plain(own[:_LONGEST])
    if isinstance(own, dict) and len(own) <= _MOST:
        return {
            plain(str(key))[:64]: value
            for key, value in own.items()
            if _is_number(value) and abs(value) < _LARGEST
        }
    return ...
