"""The index of a published run: one signed `publication` statement for each bundle.

The log's key signs the statements. Each statement names its predecessor, so nobody can leave out or
exchange a bundle. The index is a file beside the bundles, not part of the log: a finished log, and
the heads of it that others keep, stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import Prefix
from dilocox.record.log.digests import digest_text, sha256
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.state_statements import whole

INDEX = "publication.jsonl"
"""Name of the index at the URL of a published run."""
INDEX_BYTES = 1 << 26
"""Limit in bytes of an index."""
INDEX_USUAL = 1 << 20
"""Bytes of an index for which a reader waits on the slowest link."""
PUBLICATION = "urn:dilocox:publication:v1"
"""The whole `predicateType`. These statements are never part of a log."""
MOST_PART = 1 << 26
"""Largest part of a bundle, in bytes, that a reader fetches."""
_LAST = 2**53
_MEMBER = re.compile(r"[A-Za-z0-9._/-]{0,200}")


class OtherLogError(RecordError):
    """An index that names another log."""


@dataclass(frozen=True)
class ZerogFile:
    """A file in 0G Storage."""

    root: str
    """Root of its tree (`zerog_root`), hex."""
    transaction: str
    """Hash of the transaction that has submitted the root to the contract, hex."""


@dataclass(frozen=True)
class Bundle:
    """One bundle: a tar file, kept in parts of equal size; the last part may be smaller."""

    number: int
    """Position in the index, from 0."""
    digest: str
    """SHA-256 of the tar file, hex."""
    size: int
    """Bytes of the tar file."""
    part_size: int
    """Bytes of each part but the last."""
    parts: tuple[str, ...]
    """SHA-256 of each part, hex."""
    head: Prefix
    """The log's first statements, which this bundle and those before it hold."""
    toward: int = 0
    """If the next bundle continues the same rounds: number of the log's statements once they are
    complete; else 0. Only the last bundle of these rounds has their statements."""
    until: str = ""
    """With `toward`: name of this bundle's last object; the next bundle begins after it."""
    missing: int = 0
    """Number of objects that the rounds' statements name, and that no store had."""
    last: bool = False
    """True if the run had ended, and nothing was left to publish."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the bundle's files that are neither statements nor objects of the store."""
    zerog: ZerogFile | None = None
    """Where the bundle lies in 0G Storage; None in other storage."""

    @property
    def name(self) -> str:
        """Path of the tar file below the URL, without the numbers of its parts."""
        return f"bundles/{self.number:06d}-{self.digest[:16]}.tar"

    def paths(self) -> list[str]:
        """Return the paths of the parts below the URL, in order.

        A tar file in one part has the bundle's own name. The parts of a larger file have numbers,
        so that `cat` in the order of their names gives the file.
        """
        if len(self.parts) == 1:
            return [self.name]
        return [f"{self.name}.{number:06d}" for number in range(len(self.parts))]

    def statement(self, run: str, log: NoteKey, previous: str) -> s.Statement:
        """Build the statement on this bundle.

        Args:
            run: Id of the run.
            log: The log's public key.
            previous: SHA-256 of the index's line before this one, hex; empty for the first.
        """
        return s.Statement(
            PUBLICATION,
            {"bundle": self.digest},
            {
                "run": run,
                "log": str(log),
                "previous": previous,
                "number": self.number,
                "bytes": self.size,
                "part_bytes": self.part_size,
                "parts": list(self.parts),
                "size": self.head.size,
                "root": self.head.root,
                "toward": self.toward,
                "until": self.until,
                "missing": self.missing,
                "last": self.last,
                "files": dict(self.files),
                **({} if self.zerog is None else {"zerog": vars(self.zerog)}),
            },
        )

    @classmethod
    def of(cls, statement: s.Statement) -> Bundle:
        """Parse a statement. Raises `RecordError` if it is malformed."""
        said = statement.predicate
        with whole(statement):
            found = cls(
                number=_count(said["number"]),
                digest=digest_text(statement.subjects["bundle"]),
                size=_count(said["bytes"]),
                part_size=_count(said["part_bytes"]),
                parts=tuple(digest_text(each) for each in said["parts"]),
                head=Prefix(_count(said["size"]), digest_text(said["root"])),
                toward=_count(said["toward"]),
                until=str(said["until"]),
                missing=_count(said["missing"]),
                last=said["last"] is True,
                files={str(name): digest_text(each) for name, each in said["files"].items()},
                zerog=_zerog_file(said["zerog"]) if "zerog" in said else None,
            )
            if not 0 < found.part_size <= MOST_PART or not _MEMBER.fullmatch(found.until):
                raise ValueError(found.part_size)
            if len(found.parts) != max(1, -(-found.size // found.part_size)):
                raise ValueError(found.parts)
            return found


@dataclass
class Publication:
    """A published run, as its index describes it."""

    log: NoteKey
    run: str
    bundles: list[Bundle] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """The signed statements on `bundles`."""

    @property
    def head(self) -> Prefix | None:
        """The log's first statements that all bundles hold together; None without a bundle."""
        return self.bundles[-1].head if self.bundles else None

    @property
    def counted(self) -> str:
        """The number of bundles, for users."""
        return f"{len(self.bundles)} bundle{'s' * (len(self.bundles) != 1)}"

    @property
    def newest(self) -> str:
        """Size and root of the log in the newest bundle, for users."""
        head = self.head
        return f"log of {head.size} statements, root {head.root[:12]}…" if head else "no log"

    @property
    def text(self) -> str:
        """The index file."""
        return "".join(f"{line}\n" for line in self.lines)

    def add(self, bundle: Bundle, signer: s.Signer) -> None:
        """Append a bundle. `signer`: the log's private key."""
        previous = sha256(self.lines[-1].encode()) if self.lines else ""
        self.lines.append(signer.sign(bundle.statement(self.run, self.log, previous)))
        self.bundles.append(bundle)

    @classmethod
    def parse(cls, text: str, key: str | None = None) -> Publication:
        """Parse and check an index.

        Args:
            text: Content of the index file.
            key: The log's key, from another source than the index. None: the key that the index
                names.

        Raises:
            OtherLogError: The index names another key.
            RecordError: The index is malformed, cut within a line, or not signed by the key.
        """
        lines = text.split("\n")
        if lines.pop() != "" or not lines:
            raise RecordError("its last line was cut short")
        first = s.opened(lines[0])[0].predicate
        named = NoteKey.parse(str(first.get("log", "")))
        log = named if key is None else NoteKey.parse(key)
        if log != named:
            raise OtherLogError(f"it is of log {named}, not of {log}")
        found = cls(log, str(first.get("run", "")))
        for line in lines:
            found._take(line)
        return found

    def _take(self, line: str) -> None:
        kinds = (PUBLICATION,)
        statement = s.open_signed(line, self.log.public.hex(), run=self.run, kinds=kinds)
        bundle = Bundle.of(statement)
        previous = sha256(self.lines[-1].encode()) if self.lines else ""
        size = self.head.size if self.head else 0
        if (
            bundle.number != len(self.bundles)
            or statement.predicate.get("previous") != previous
            or statement.predicate.get("log") != str(self.log)
            or bundle.head.size < size
        ):
            raise RecordError(f"its line {len(self.lines) + 1} does not follow the line before")
        self.lines.append(line)
        self.bundles.append(bundle)


def _zerog_file(said: Mapping[str, str]) -> ZerogFile:
    return ZerogFile(digest_text(said["root"]), digest_text(said["transaction"]))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LAST:
        raise ValueError(value)
    return value
