"""Kinds of reports that a site sends about a round, and the fields that each kind must have.

The values of a report are claims of its site. The coordinator, not the report, sets which site
reported, about which round and when. Code that reads reports relies on the required fields, so a
report without them is rejected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dilocox.coordinator.protocol.task_figures import checked_figures
from dilocox.utils.plain_text import plain

JOURNALS = "site-*.jsonl"
"""Name pattern of a site's progress files in its run folder; `dilocox status` reads them."""
KINDS = (
    "round", "flush", "evaluation", "first_evaluation", "peer_evaluation", "tasks", "first_tasks",
    "warning",
)  # fmt: skip
FIRST = {"evaluation": "first_evaluation", "tasks": "first_tasks"}
"""Kind of the report before training, by kind of the reports after a round. In `metrics.jsonl` both
have the second kind, and `after_round` is -1 before training."""
RESERVED = ("kind", "round", "site", "time", "about")
"""Fields that the writer of `metrics.jsonl` sets in every line; a report cannot set them."""
_ROUND = (
    "step", "tokens", "seconds", "tokens_per_second", "wait_share", "payload_bytes",
    "allreduce_bytes", "ratio_per_transfer", "members",
)  # fmt: skip
_NUMBERS: Mapping[str, tuple[str, ...]] = {"round": _ROUND, "flush": _ROUND}
"""Required fields by kind; each value is a finite number of at least 0."""
_DEVICES = ("mfu", "peak_flops", "peak_memory_bytes", "peak_reserved_bytes", "allocation_retries")
"""Optional fields; where present, each value is a finite number of at least 0."""
_LONGEST, _MOST, _LARGEST = 500, 4096, 2**63


def checked(kind: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a report that may be written to `metrics.jsonl`.

    Reserved fields and values of unsupported types are left out. Raises `ValueError` if the kind is
    unknown, or if a field that the kind requires is missing or invalid. A loss that is not finite
    comes as null, because JSON has no NaN; it becomes NaN here.
    """
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
        if "loss" in found:
            _take_loss(found, "loss")
        _need(isinstance(found.get("waited_for", {}), dict), "waited_for")
        _need(isinstance(found.get("dropped", ""), str), "dropped")
    elif kind == "warning":
        _need(isinstance(found.get("text"), str), "text")
    else:
        if kind in ("tasks", "first_tasks"):
            found |= checked_figures(metrics)
        else:
            _take_loss(found, "val_loss")
        after = found.get("after_round")
        _need(isinstance(after, int) and (after == -1) == (kind in FIRST.values()), "after_round")
    return found


def kind_of_report(record: Mapping[str, Any]) -> str:
    """Return the kind of the report from which a line of `metrics.jsonl` was written."""
    kind, after = str(record.get("kind")), record.get("after_round")
    return FIRST.get(kind, kind) if isinstance(after, int) and after < 0 else kind


def settled_anchor(
    reports: Mapping[str, Mapping[str, Any]], members: int
) -> tuple[str | None, list[str]] | None:
    """Return the anchor digest that most sites report for a round, and the sites that differ.

    Returns None if the digests differ and none has a majority. `members` is the number of sites
    that should report. While reports are missing, a majority is more than half of all members. A
    report without a digest does not count: the other sites went on without its site. If no report
    has a digest, the result is (None, []).
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


def _take_loss(found: dict[str, Any], key: str) -> None:
    """Check a field that must be there, and may be any number. Null becomes NaN."""
    if key in found and found[key] is None:
        found[key] = math.nan
    _need(_is_number(found.get(key)), key)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _counts(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0


def _value(own: object) -> Any:
    """Return a number, None, a shortened text or numbers by name; Ellipsis for anything else."""
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
