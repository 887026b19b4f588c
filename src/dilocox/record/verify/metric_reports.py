"""Signed digests of sites' metric reports, and the comparison of `metrics.jsonl` with them.

A site signs the digest of each report. So the loss curve on a run's page is what the sites signed,
and the coordinator cannot show another curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785

from dilocox.coordinator.protocol.metric_lines import subject_of
from dilocox.coordinator.protocol.site_reports import FIRST, RESERVED, checked, kind_of_report
from dilocox.coordinator.protocol.task_figures import moment
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.digests import sha256
from dilocox.record.log.entries import lines_of
from dilocox.record.log.state_statements import SIGNED_REPORTS
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.rank_recorder import SigningIdentity
from dilocox.utils.json_lines import is_torn, object_of

FILE = "metrics.jsonl"
_EXACT = 2**53
"""Bound on integers in canonical JSON, which must be smaller."""
Line = Mapping[str, Any]
Key = tuple[str, int, str]
"""(kind, round, site); an evaluation before training has round -1."""
_OF_ANCHOR = (*FIRST, *FIRST.values())
"""Kinds of reports about the anchor after a round, or before training."""


def report_digest(kind: str, metrics: Mapping[str, Any]) -> str:
    """Return the SHA-256, hex, of a report in `metrics.jsonl`, without fields its writer adds."""
    added = (*RESERVED, "step") if kind in _OF_ANCHOR else RESERVED
    said = {key: _plain(value) for key, value in metrics.items() if key not in added}
    return sha256(rfc8785.dumps(said))


def _plain(value: Any) -> Any:
    """Convert a value to its JSON form: a non-finite float to None, a large integer to a float."""
    if isinstance(value, Mapping):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _EXACT:
        return float(value)
    return value


def signed_report(
    author: SigningIdentity, kind: str, round_: int, metrics: Mapping[str, Any]
) -> str | None:
    """Sign the report of a site's leading rank; return the envelope.

    Returns None for kinds of reports that are not signed.
    """
    if kind not in SIGNED_REPORTS:
        return None
    rank = author.rank
    said = {"site": rank.site, "stage": rank.stage, "shard": rank.shard,
            "round": round_, "kind": kind}  # fmt: skip
    digest = report_digest(kind, checked(kind, metrics))
    statement = s.Statement(s.REPORT, {"report": digest}, {"run": author.run, **said})
    return author.signer.sign(statement)


def judge_reports(course: RunHistory, folder: Path) -> str:
    """Compare a run's `metrics.jsonl` in `folder` with the signed reports.

    Returns a line on what was compared. Raises `RecordError` (FAIL) and `NotRunError`.
    """
    if not course.manifest.get("reports"):
        raise NotRunError("the run was recorded by a dilocox whose sites signed no metrics")
    path = folder / FILE
    if not path.exists():
        raise NotRunError(f"{path}: not there")
    lines, rounds = _lines(path)
    unsigned = []
    for key, several in lines.items():
        signed = course.reports.get(key)
        if not signed:
            unsigned.append(key)
        elif any(each.digest not in signed for each in several):
            raise RecordError(f"{path}: {_named(key)} is not the one that {key[2]} has signed")
    for key in course.reports:
        if key not in lines:
            raise RecordError(f"{path}: {_named(key)}, which {key[2]} has signed, is not there")
    by_round: dict[int, list[_Told]] = {}
    for (kind, number, _), several in lines.items():
        if kind == "round":
            by_round.setdefault(number, []).append(several[-1])
    partly = [number for number, line in rounds.items()
              if not _combined(path, number, line, by_round.get(number, []))]  # fmt: skip
    # The newest round may still be going on.
    lacking = sorted(by_round.keys() - rounds.keys() - {max(by_round, default=0)})
    if unsigned:
        more = f" and {len(unsigned) - 1} more" if unsigned[1:] else ""
        raise NotRunError(f"{_named(unsigned[0])} of {unsigned[0][2]}{more}: not signed")
    if partly:
        raise NotRunError(f"round {partly[0]} of the run was made of some sites' reports alone")
    if lacking:
        raise NotRunError(f"round {lacking[0]} has reports of sites, and no line of the whole run")
    if not lines:
        raise NotRunError("no site has reported anything")
    sites = sorted({site for _, _, site in lines})
    losses, tasks = (
        sum(kind in (own, first) for kind, _, _ in lines) for own, first in FIRST.items()
    )
    told = f"{len(lines) - losses - tasks} reports of rounds and {losses} of the held-out loss"
    more = f", and {tasks} of tasks, which are reported and not recomputed" if tasks else ""
    return f"{told}{more}, signed by {', '.join(sites)}"


def _named(key: Key) -> str:
    kind, round_, _ = key
    if kind == "first_evaluation":
        return "the held-out loss before training"
    if kind == "evaluation":
        return f"the held-out loss after round {round_}"
    if kind in ("tasks", "first_tasks"):
        return f"the report on tasks {moment(round_)}"
    return f"the report of round {round_}"


@dataclass(frozen=True, slots=True)
class _Told:
    """The needed parts of a line; the whole lines of a long run would not fit into memory."""

    digest: str
    """Digest of a site's report; empty for a line without one, which no site can have signed."""
    tokens: Any
    loss: Any
    sites: Any

    @classmethod
    def of(cls, line: Line, kind: str | None) -> _Told:
        """Take the parts of `line`. `kind`: of a site's report; None for a line on the run."""
        digest = ""
        if kind is not None:
            try:
                digest = report_digest(kind, line)
            except (ValueError, OverflowError, RecursionError, rfc8785.CanonicalizationError):
                pass  # no digest: nobody can have signed such a line
        return cls(digest, line.get("tokens"), line.get("loss"), line.get("sites"))


def _lines(path: Path) -> tuple[dict[Key, list[_Told]], dict[int, _Told]]:
    """Return the sites' lines that count, and the lines on the whole run by round.

    A resume goes back to the beginning of a round. Earlier lines about that round and later rounds
    do not count. The begin of a line, which a killed process leaves, does not count either. Raises
    `RecordError` for a line that the run's writer cannot have written.
    """
    lines: dict[Key, list[_Told]] = {}
    rounds: dict[int, _Told] = {}
    for number, row in enumerate(lines_of(path), 1):
        line = object_of(row)
        if line is None:
            if is_torn(row):
                continue
            raise RecordError(f"{path}: line {number} is damaged")
        try:
            about = subject_of(line)
        except ValueError as error:
            raise RecordError(f"{path}: line {number}: {error}") from None
        if about is None:
            continue
        if about.kind == "resumed":
            lines = {key: each for key, each in lines.items() if key[1] < about.number}
            rounds = {r: each for r, each in rounds.items() if r < about.number}
        elif about.site:
            said = kind_of_report(line)
            lines.setdefault((said, about.number, about.site), []).append(_Told.of(line, said))
        else:
            rounds[about.number] = _Told.of(line, None)
    return lines, rounds


def _combined(path: Path, number: int, line: _Told, rows: Sequence[_Told]) -> bool:
    """Check that the line of a round combines the reports of its sites.

    Returns False if reports of some sites, or of all, are missing. Raises `RecordError` if the loss
    or the tokens differ.
    """
    if not rows or line.sites != len(rows):
        return False
    try:
        with_loss = [(own.loss, own.tokens) for own in rows if own.loss is not None]
        weight = sum(tokens for _, tokens in with_loss)
        tokens = sum(own.tokens for own in rows)
        loss = sum(loss * share for loss, share in with_loss) / weight if weight else None
        same = tokens == line.tokens and _same(loss, line.loss)
    except (TypeError, OverflowError):  # a value is not a number, or too large
        same = False
    if not same:
        raise RecordError(f"{path}: loss or tokens of round {number} are not what its sites report")
    return True


def _same(ours: float | None, theirs: Any) -> bool:
    if ours is None or not isinstance(theirs, int | float):
        return ours is None and theirs is None
    return math.isclose(ours, theirs, rel_tol=1e-9)
