"""What a run owes its sites: a pure function of the first statements of its log.

Paid are token ranges whose contribution counts in an outer step. The exchanges of a round, one per
stage and fragment, have equal parts in the payment of the round's tokens. A site gets the parts of
those exchanges in whose contribution set it is, with a payload of each of its ranks that the site
itself has signed. A contribution whose share is 0 is not paid; one that was reduced is paid whole.

Rounds that a resume has abandoned are not paid, nor are rounds of a site with the verdict MISMATCH
or FAIL of one of the run file's auditors. Rounds whose token ranges or exchanges cannot be right
are not paid, either (`token_ranges`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from dilocox.errors import RecordError, SettlementError
from dilocox.record.log.audit_verdicts import BAD
from dilocox.record.log.merkle import Frontier
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.step_statements import Step
from dilocox.record.log.transparency_log import (
    ENTRIES,
    LogContent,
    check_log,
    leaves_of,
    read_covered,
    read_text,
)
from dilocox.record.log.verdict_statements import HandedIn, latest
from dilocox.record.verify.run_history import RunHistory, read_history
from dilocox.record.verify.verdict_validity import is_about
from dilocox.tools.settlement.token_ranges import impossible_rounds

WEI_PER_PRICE = 1000
"""Wei per token at a price of one gwei per million tokens: 1e9 / 1e6."""


@dataclass(frozen=True)
class SiteAmount:
    """What one site has earned since the run began."""

    site: str
    account: str
    """The site's address; empty if the run file names none."""
    tokens: Fraction
    """Tokens that are paid; a token counts by the part of its round's exchanges that count."""
    rounds: int
    """Rounds in which some of the site's tokens are paid."""
    withheld: tuple[int, ...]
    """Rounds that are not paid because of an auditor's verdict."""
    wei: int
    """The amount, rounded down once, at the end."""


@dataclass(frozen=True)
class LogPrefix:
    """The first statements of a run's log, with all signatures checked."""

    size: int
    root: bytes
    """RFC 6962 root."""
    course: RunHistory
    entries: Sequence[str]


def read_prefix(folder: Path, size: int | None = None, key: str | None = None) -> LogPrefix:
    """Read the first `size` statements of the log in a run's folder.

    Args:
        folder: The run's folder.
        size: Number of statements; None: all that the log's newest checkpoint covers.
        key: The log's key, from another source than the record; None: the record's own.

    Raises:
        SettlementError: The log's checkpoint does not cover so many statements.
        RecordError: The log cannot be read, or is not what its key has signed.
    """
    content = covered(folder, key)
    size = len(content.entries) if size is None else size
    if not 0 < size <= len(content.entries):
        raise SettlementError(
            f"{folder}: the log's checkpoint covers {len(content.entries)} statements, not {size}"
        )
    entries = content.entries[:size]
    root = Frontier(leaves_of(entries)).root
    return LogPrefix(size, root, read_history(entries, NoteKey.parse(content.public)), entries)


def read_beginning(folder: Path) -> RunHistory:
    """Read the first statement of the log in a run's folder, with its signature checked.

    It names the run file. The log's checkpoint need not cover it: sites that join by stake wait
    until the run is registered, and the first checkpoint waits for them.

    Raises `RecordError` if the statement cannot be read, or is not what the log's key has signed.
    """
    record = folder / "record"
    key = NoteKey.parse(read_text(record / "log.pub").strip())
    path = record / ENTRIES
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None
    if not first.endswith("\n"):
        raise RecordError(f"{path}: has no statement yet: start dilocox coordinator first")
    return read_history([first.removesuffix("\n")], key)


def covered(folder: Path, key: str | None = None) -> LogContent:
    """Open the covered part of the log in a run's folder.

    Size and root are compared with the signed checkpoint; signatures of statements are not
    checked. Raises `RecordError` if the log cannot be read, or is not what its key has signed.
    """
    record = folder / "record"
    public = read_text(record / "log.pub").strip() if key is None else key
    content = read_covered(record, NoteKey.parse(public))
    check_log(content, NoteKey.parse(public))
    return content


def amounts(course: RunHistory) -> list[SiteAmount]:
    """Return what each site has earned, sorted by name. Pure.

    Raises `SettlementError` if the run file has no `[settlement]`, or is malformed.
    """
    terms = terms_of(course)
    with countable():
        length = int(course.config["data"]["sequence_length"])
        verdicts, impossible = _verdicts(course, terms), impossible_rounds(course)
        earned: dict[str, dict[int, Fraction]] = {}
        withheld: dict[str, set[int]] = {}
        for step in course.steps.values():
            if step.flush or step.key.round in impossible:
                continue
            for site in _contributors(course, step):
                if _is_refused(course, step, verdicts.get((site, step.key.round), ())):
                    withheld.setdefault(site, set()).add(step.key.round)
                    continue
                tokens = length * sum(int(count) for _, count in step.said["ranges"][site])
                part = Fraction(tokens, course.stages * step.fragments)
                of_round = earned.setdefault(site, {})
                of_round[step.key.round] = of_round.get(step.key.round, Fraction()) + part
        return [
            _amount(site, terms, earned.get(site, {}), withheld.get(site, set()))
            for site in sorted({*earned, *withheld})
        ]


@contextlib.contextmanager
def countable() -> Iterator[None]:
    """Raise `SettlementError` in place of what a malformed run file leads to."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        kind = type(error).__name__
        raise SettlementError(
            f"the run file in the log is malformed, so nothing is owed by it ({kind}: {error})"
        ) from None


def _contributors(course: RunHistory, step: Step) -> list[str]:
    """Return the sites of the set that have signed a payload of each shard, with a share above 0.

    The payloads of a step are the coordinator's word. They count if their site has signed them.
    """
    shares = dict(zip(step.set, step.shares, strict=True)) if step.shares else {}
    found = []
    for site in dict.fromkeys(step.set):
        signed = [
            course.contributions.get((step.key.text, step.attempt, site, shard))
            for shard in range(course.shards)
        ]
        named = [step.payloads.get(f"{site}/{shard}") for shard in range(course.shards)]
        own = shares.get(site, ())
        # A shard without shares counts whole.
        nothing = bool(own) and all(each and not any(each) for each in own)
        if None not in named and signed == named and not nothing:
            found.append(site)
    return found


def by_account(found: list[SiteAmount]) -> dict[str, int]:
    """Return wei by account, for sites that have one and have earned something."""
    total: dict[str, int] = {}
    for each in found:
        if each.account and each.wei:
            total[each.account] = total.get(each.account, 0) + each.wei
    return total


def terms_of(course: RunHistory) -> Mapping[str, Any]:
    """Return `[settlement]` of the run file. Raises `SettlementError` if it has none."""
    terms: Mapping[str, Any] | None = course.config.get("settlement")
    if terms is None:
        raise SettlementError(
            "the run file has no [settlement], so nothing has a price; name price and accounts "
            "there before the run begins"
        )
    return terms


def _amount(
    site: str, terms: Mapping[str, Any], rounds: Mapping[int, Fraction], withheld: set[int]
) -> SiteAmount:
    tokens = sum(rounds.values(), Fraction())
    wei = int(tokens * int(terms["price"]) * WEI_PER_PRICE)
    # Small letters: so an account that two sites write in two ways is one.
    account = str(terms["accounts"].get(site, "")).lower()
    return SiteAmount(site, account, tokens, len(rounds), tuple(sorted(withheld)), wei)


def _verdicts(
    course: RunHistory, terms: Mapping[str, Any]
) -> dict[tuple[str, int], list[HandedIn]]:
    """Return the verdicts of the run file's auditors by (site, round)."""
    found: dict[tuple[str, int], list[HandedIn]] = {}
    for each in course.verdicts:
        if each.auditor in terms["auditors"]:
            found.setdefault((each.site, each.round), []).append(each)
    return found


def _is_refused(course: RunHistory, step: Step, verdicts: Sequence[HandedIn]) -> bool:
    """Return True if an auditor's newest verdict on an exchange of a site's round is bad."""
    there = [each for each in verdicts if is_about(course, each, step.key.text)]
    return any(each.verdict in BAD for each in latest(there))
