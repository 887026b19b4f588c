"""Parsers of the statements that sites sign about their states.

The notary parses each statement with this code before it appends the statement to the log, and
readers use the same code. A malformed statement in the log would stop every reader there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.digests import digest_text

P = ParamSpec("P")


@dataclass(frozen=True)
class State:
    """A site's signed statement of one stage's tensors, at the start or the end of a run."""

    kind: str
    """`initial` or `final`."""
    site: str
    stage: int
    root: str
    """Merkle root over the tensors, hex."""
    listing: str
    """SHA-256 of the list of tensors in the store."""
    files: Mapping[str, str]
    """With `final`: SHA-256 of the other files in the published folder, by name."""
    number: int
    """Index of the statement in the log, from 0."""
    published: tuple[str, str] | None = None
    """With `final`: root and list of the published tensors, in the form of `root` and `listing`.
    None if the model is published in the dtype of the state."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """With `initial` weights from a seed: the site's statement of the facts on which their bits
    depend (see `fresh_facts`)."""

    @classmethod
    def of(cls, statement: s.Statement, number: int) -> State:
        """Parse statement `number` of the log. Raises `RecordError` if it is malformed."""
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
    """A site's signed statement of the state in which one of its ranks began a round."""

    site: str
    stage: int
    shard: int
    round: int
    tick: int
    """Slots of the run that had ended when the round began."""
    root: str
    """Merkle root over the state's tensors, hex."""
    document: str
    """SHA-256 of the state's document in the store (see `dilocox.record.log.round_document`)."""
    steps: str | None
    """SHA-256 of the fingerprints of the previous round's inner steps; None if there are none."""
    served: str
    """`yes`: the state's tensors are in the store. `private`: the tensors are withheld, because the
    site trains on text of its own. `no`: the statement only marks the end of a round."""
    number: int
    """Index of the statement in the log, from 0."""

    @classmethod
    def of(cls, statement: s.Statement, number: int) -> RoundState:
        """Parse statement `number` of the log. Raises `RecordError` if it is malformed."""
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
    """A site's signed statement of a rank's anchor and outer momentum when a round began.

    A replay may begin from this state (see `dilocox.record.writer.windows`).
    """

    site: str
    stage: int
    shard: int
    round: int
    """The round that was about to begin."""
    tick: int
    """Slots of the run that had ended when the round began."""
    landed: tuple[int, ...]
    """By piece: the last round whose outer step the piece has taken; -1 if none has."""
    root: str
    """Merkle root over the tensors, hex."""
    listing: str
    """SHA-256 of the list of tensors in the store."""

    @classmethod
    def of(cls, statement: s.Statement) -> AnchorState:
        """Parse a statement. Raises `RecordError` if it is malformed."""
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


def readable(told: Callable[P, str]) -> Callable[P, str]:
    """Decorate a function that renders statements: malformed fields raise `RecordError`.

    A stranger's log may contain any value in a field that no parser has checked.
    """

    @functools.wraps(told)
    def line(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return told(*args, **kwargs)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RecordError("a statement of the coordinator is malformed") from None

    return line


SIGNED_REPORTS = ("round", "flush", "evaluation", "first_evaluation", "tasks", "first_tasks")
"""Kinds of reports that sites sign, as `Report.kind`."""


@dataclass(frozen=True)
class Report:
    """A site's signed report on a round (see `dilocox.record.verify.metric_reports`)."""

    kind: str
    round: int
    """-1 for an evaluation before the first round."""
    site: str
    digest: str
    """SHA-256, hex, of the report."""

    @classmethod
    def of(cls, statement: s.Statement) -> Report:
        """Parse a statement. Raises `RecordError` if it is malformed."""
        said = statement.predicate
        with whole(statement):
            kind, round_ = str(said["kind"]), int(said["round"])
            if kind not in SIGNED_REPORTS or round_ < 0:
                raise ValueError(kind)
            digest = digest_text(statement.subjects["report"])
            round_ = -1 if kind in ("first_evaluation", "first_tasks") else round_
            return cls(kind, round_, str(said["site"]), digest)


@contextlib.contextmanager
def whole(statement: s.Statement) -> Iterator[None]:
    """Raise `RecordError` in place of the errors that parsing a malformed statement raises."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RecordError(f"{statement.kind} is malformed") from None
