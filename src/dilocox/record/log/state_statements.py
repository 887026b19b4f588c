"""What sites sign of the states that they hold: each statement taken apart, or refused.

The notary takes statements apart before they enter the log, by the same code as its readers: what
is not whole there would keep everybody from reading the rest.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.digests import digest_text

P = ParamSpec("P")
_FORMAT = re.compile("[a-z0-9/._+-]{1,64}")


@dataclass(frozen=True)
class State:
    """A stage's tensors at one moment, as a site has signed them."""

    kind: str
    """`initial` or `final`."""
    site: str
    stage: int
    root: str
    """Root over the tensors, hex."""
    listing: str
    """SHA-256 of the list of tensors in the store."""
    files: Mapping[str, str]
    """Of `final`: SHA-256 of the published folder's other files, by name."""
    number: int
    """Which statement of the log this is, from 0."""
    published: tuple[str, str] | None = None
    """Of `final`, published in another dtype: root and list of the tensors as they were published,
    as `root` and `listing` are of the state."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of `initial`: what its bits hang on where they come from a seed, as the site says (see
    `fresh_facts`)."""

    @classmethod
    def of(cls, statement: s.Statement, number: int) -> State:
        """Raises `RecordError` for a statement that is not whole."""
        said, subjects = statement.predicate, statement.subjects
        with whole(statement):
            return cls(
                kind=str(said["kind"]),
                site=str(said["site"]),
                stage=int(said["stage"]),
                root=digest_text(subjects["state"]),
                listing=digest_text(subjects["tensors"]),
                files={str(name): digest_text(one) for name, one in said.get("files", {}).items()},
                number=number,
                published=(
                    (digest_text(subjects["published"]), digest_text(subjects["published-tensors"]))
                    if "published" in subjects
                    else None
                ),
                facts=dict(said.get("class", {})),
            )


@dataclass(frozen=True)
class RoundState:
    """The state in which a rank began a round, as its site has signed it."""

    site: str
    stage: int
    shard: int
    round: int
    tick: int
    """Slots that had ended."""
    root: str
    """Root over its tensors, hex."""
    document: str
    """SHA-256 of what else is said of it (see `dilocox.record.log.round_document`), in the
    store."""
    steps: str | None
    """SHA-256 of the fingerprints of the round before's inner steps, if they were taken."""
    served: str
    """`yes`: its tensors are in the store. `private`: withheld, the site trains on text of its
    own. `no`: only the end of a round is signed."""
    number: int
    """Which statement of the log this is, from 0."""

    @classmethod
    def of(cls, statement: s.Statement, number: int) -> RoundState:
        """Raises `RecordError` for a statement that is not whole."""
        said, subjects = statement.predicate, statement.subjects
        with whole(statement):
            return cls(
                site=str(said["site"]),
                stage=int(said["stage"]),
                shard=int(said["shard"]),
                round=int(said["round"]),
                tick=int(said["tick"]),
                root=digest_text(subjects["state"]),
                document=digest_text(subjects["document"]),
                steps=digest_text(subjects["steps"]) if "steps" in subjects else None,
                served=str(said["served"]),
                number=number,
            )


@dataclass(frozen=True)
class AnchorState:
    """What a rank held of its anchor and outer momentum when a round began, as its site has signed
    it: a replay may begin there (see `dilocox.record.writer.windows`)."""

    site: str
    stage: int
    shard: int
    round: int
    """The round that was about to begin."""
    tick: int
    """Slots that had ended."""
    landed: tuple[int, ...]
    """By piece: the last round whose outer step the piece has taken; -1: none."""
    root: str
    """Root over the tensors, hex."""
    listing: str
    """SHA-256 of the list of tensors in the store."""

    @classmethod
    def of(cls, statement: s.Statement) -> AnchorState:
        """Raises `RecordError` for a statement that is not whole."""
        said, subjects = statement.predicate, statement.subjects
        with whole(statement):
            found = cls(
                site=str(said["site"]),
                stage=int(said["stage"]),
                shard=int(said["shard"]),
                round=int(said["round"]),
                tick=int(said["tick"]),
                landed=tuple(int(each) for each in said["landed"]),
                root=digest_text(subjects["state"]),
                listing=digest_text(subjects["tensors"]),
            )
            if any(not -1 <= each < found.round for each in found.landed):
                raise ValueError(found.landed)
            return found


@dataclass(frozen=True)
class Attestation:
    """A site's evidence of what it ran on. Nothing here judges it."""

    site: str
    format: str
    """What kind of evidence, as the site names it: 1 to 64 of a-z, 0-9 and "/._+-"."""
    evidence: str
    """SHA-256, hex, of it in the store."""

    @classmethod
    def of(cls, statement: s.Statement) -> Attestation:
        """Raises `RecordError` for a statement that is not whole."""
        said = statement.predicate
        with whole(statement):
            evidence = digest_text(statement.subjects["evidence"])
            kind = str(said["format"])
            if not _FORMAT.fullmatch(kind):
                raise ValueError(kind)
            return cls(str(said["site"]), kind, evidence)


def readable(told: Callable[P, str]) -> Callable[P, str]:
    """What goes wrong while statements are told is a `RecordError`: a stranger's may say anything
    where no reader has to take it apart."""

    @functools.wraps(told)
    def line(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return told(*args, **kwargs)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RecordError("a statement of the coordinator is not whole") from None

    return line


SIGNED_REPORTS = ("round", "flush", "evaluation", "first_evaluation")
"""Kinds of reports that sites sign."""


@dataclass(frozen=True)
class Report:
    """What a site has reported of a round (see `dilocox.record.verify.metric_reports`)."""

    kind: str
    round: int
    """-1: before the first."""
    site: str
    digest: str
    """SHA-256, hex, of the report."""

    @classmethod
    def of(cls, statement: s.Statement) -> Report:
        """Raises `RecordError` for a statement that is not whole."""
        said = statement.predicate
        with whole(statement):
            kind, round_ = str(said["kind"]), int(said["round"])
            if kind not in SIGNED_REPORTS or round_ < 0:
                raise ValueError(kind)
            digest = digest_text(statement.subjects["report"])
            round_ = -1 if kind == "first_evaluation" else round_
            return cls(kind, round_, str(said["site"]), digest)


@contextlib.contextmanager
def whole(statement: s.Statement) -> Iterator[None]:
    """What goes wrong while a statement is taken apart is a `RecordError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RecordError(f"{statement.kind}: not whole") from None
