"""Judges a run that was fetched from bundles: the claim `bundles`, then all others."""

from __future__ import annotations

from dataclasses import replace

from dilocox.errors import RecordError
from dilocox.record.bundles.fetch import Fetched
from dilocox.record.bundles.publication import Publication
from dilocox.record.log.merkle import roots_at
from dilocox.record.log.transparency_log import leaves_of, open_log
from dilocox.record.verify import claims as c
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import Progress, Report, verify

ALWAYS = (c.LOG, c.SIGNATURES, c.COMPLETE, c.COMMITMENTS, c.RUN_FILE, c.PAYLOADS, c.REPLAY, c.MODEL)
"""Required claims, which are NOT_RUN if the bundles are not what was published."""


def verify_fetched(found: Fetched, places: Places, progress: Progress) -> Report:
    """Judge the claim `bundles`, and every claim of the record in `found.folder`.

    `places.run` is `found.folder`. Raises `RecordError` if the bundles hold no readable record.
    """
    if found.fault or found.publication is None:
        return _unread(found, places)
    if found.publication.head is None or not (found.folder / "record" / "checkpoint").exists():
        return _unread(replace(found, fault="no bundle holds statements of the log"), places)
    report = verify(places, progress)
    inside = f"{found.folder}/"
    findings = [replace(each, reason=each.reason.replace(inside, "")) for each in report.findings]
    try:
        finding = c.Finding(c.BUNDLES, "PASS", judge_bundles(found, found.publication))
    except RecordError as error:
        finding = c.Finding(c.BUNDLES, "FAIL", str(error))
    return replace(report, findings=[finding, *findings])


def judge_bundles(found: Fetched, publication: Publication) -> str:
    """Return a line on the bundles. Raises `RecordError` unless their heads are this log's.

    The log's key in the bundles must be the one that has signed the index.
    """
    content = open_log(found.folder / "record")
    bundles = publication.bundles
    if content.public != str(publication.log):
        raise RecordError(f"the bundles hold the log of {content.public[:80]}")
    roots = roots_at(leaves_of(content.entries), {each.head.size for each in bundles})
    for each in bundles:
        if roots.get(each.head.size, b"").hex() != each.head.root:
            raise RecordError(
                f"{each.name}: its head of {each.head.size} statements is not a prefix of this log"
            )
    if bundles[-1].head.size != len(content.entries):
        raise RecordError(
            f"the bundles hold {len(content.entries)} statements, {bundles[-1].head.size} were "
            "published"
        )
    return _told(found.where, publication)


def _told(where: str, publication: Publication) -> str:
    bundles = publication.bundles
    size = sum(each.size for each in bundles) / 1e6
    missing = sum(each.missing for each in bundles)
    lacking = f"; {missing} objects were in no store when it was published" if missing else ""
    end = "" if bundles[-1].last else "; the run had not ended when the newest was published"
    newest = f"; newest: {publication.newest}"
    return f"{publication.counted} of {where}, {size:.1f} MB{newest}{lacking}{end}"


def _unread(found: Fetched, places: Places) -> Report:
    because = f"claim {c.BUNDLES.name} is FAIL"
    log = found.publication
    return Report(
        run=log.run if log else "",
        log=str(log.log) if log else "",
        statements=0,
        rounds=0,
        checkpoint="",
        findings=[
            c.Finding(c.BUNDLES, "FAIL", found.fault),
            *(
                c.Finding(each, "NOT_RUN", because)
                for each in (*ALWAYS, *places.asked(of_adapters=False))
            ),
        ],
    )
