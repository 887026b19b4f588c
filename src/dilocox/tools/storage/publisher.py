"""Publishes a run in bundles: everything that is new, each time it is asked.

The index at the URL says what has been published, so there is no state on this machine. A bundle
of some statements always has the same content, so a publisher that was killed goes on where the
storage ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dilocox.errors import RecordError
from dilocox.record.bundles.fetch import BadBundleError
from dilocox.record.bundles.place import WrongPlaceError
from dilocox.record.bundles.publication import Bundle, Publication
from dilocox.record.bundles.tar_members import STATEMENTS
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import Prefix
from dilocox.record.log.blob_store import MissingError
from dilocox.record.log.digests import sha256
from dilocox.record.log.merkle import Frontier, leaf_hash
from dilocox.record.log.signed_note import LogCheckpoint, sign_note
from dilocox.record.log.step_statements import Step
from dilocox.record.log.transparency_log import CHECKPOINT, PUBLIC
from dilocox.tools.release.local_paths import SAID, local_paths
from dilocox.tools.release.publish import refuse_secret
from dilocox.tools.storage import bundle_file
from dilocox.tools.storage.absences import Absences
from dilocox.tools.storage.bundle_file import BundleFile, pieces
from dilocox.tools.storage.contents import Contents
from dilocox.tools.storage.destination import Destination
from dilocox.tools.storage.run_source import RunSource, state_of
from dilocox.tools.storage.uplink import Uplink
from dilocox.utils.storage import sha256_of

_SCANNED = 2**28
"""Bytes: larger files are not searched for secrets. Payloads and weights are never searched."""
INDEX_SECONDS = 60.0
"""Seconds for which an index that is not due waits at most, if the uplink is free."""
_SHARE = 4
"""Such an index waits at least so many times as long as the uplink needs for it."""
Line = tuple[str, s.Statement]
"""An entry of the log, and its statement."""


@dataclass(frozen=True)
class _Member:
    """A file of a bundle."""

    name: str
    size: int
    content: Callable[[], Iterator[bytes]]
    named: bool = False
    """True to name its digest in the bundle's statement."""

    @classmethod
    def of(cls, name: str, data: bytes, named: bool = False) -> _Member:
        return cls(name, len(data), lambda: iter((data,)), named)


@dataclass
class Publisher:
    """Publishes one run to one place."""

    source: RunSource
    place: Destination
    every: int
    """Rounds of a bundle."""
    uplink: Uplink
    tell: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True)
    """Called with a line on absolute paths in a file, before the file is uploaded."""
    clock: Callable[[], float] = time.monotonic
    """Returns monotonic seconds."""
    ended: bool = False
    """True once everything of a run that has ended is published."""
    bundles: int = 0
    """Number of bundles that this process has published."""
    size: int = 0
    """Bytes that this process has uploaded, without the index."""
    _since: int = 0
    """Bytes of the bundles since an index was due."""
    _due: bool = False
    """True if an index was due since the last call of `Destination.finish`."""
    _waiting: float | None = None
    """When a bundle was published that the storage's index does not name; None if there is none."""
    _index: Publication | None = None
    _tree: Frontier = field(default_factory=Frontier)
    """Tree over the statements that are published."""
    _lines: list[Line] = field(default_factory=list)
    """Statements that were read and are not published yet."""
    _contents: Contents = field(default_factory=Contents)
    _states: set[tuple[str, int]] = field(default_factory=set)
    """(kind, stage) of all initial and final states in the log."""
    _anchors: list[s.Statement] = field(default_factory=list)
    """All statements on states from which a replay may begin."""
    _absences: Absences = field(default_factory=Absences)
    _told: set[str] = field(default_factory=set)
    """Lines that `tell` was called with."""

    @property
    def unpublished(self) -> int:
        """Number of statements that were read and are not published yet."""
        return len(self._lines)

    @property
    def newest(self) -> str:
        """What tells the index that is published from an older one, for users."""
        return f"{self._published.counted}, {self._published.newest}"

    def publish(self, later: bool = False) -> None:
        """Publish all rounds that are complete; of a run that has ended, everything.

        The index grows with each bundle and is sent whole. It is due once the bundles since the
        last one have as many bytes, so indexes take at most as much of the uplink as bundles.

        `later`: this call is one of many, so an index that is not due may wait. It waits while a
        coordinator runs, and then until a call finds nothing new, but not longer than
        `INDEX_SECONDS` beside a place where an index costs nothing.

        Raises:
            WrongPlaceError: The place holds another run, or is a folder with a bad index.
            RecordError: The storage fails, or answers with nonsense, or payloads are missing.
            DilocoxError: Files of the run are missing or hold secrets.
        """
        if self._index is None:
            self._index = self._opened()
        before = self.bundles
        if self._overdue:
            self._show_index()  # first, because what follows may fail for as long as it likes
        self.source.look_again()
        self._read()
        ended = self.source.has_ended(self._states)
        if ended:
            self._read()  # what was written before the end
        last = self._index.bundles[-1] if self._index.bundles else None
        if last is not None and last.toward:
            self._publish(last.toward - self._tree.size, ended)
        while (end := self._complete()) is not None:
            self._publish(end, False)
        if ended and (self._lines or self._changed(True)):
            self._publish(len(self._lines), True)
        goes_on = self.source.coordinated or self.bundles > before
        waits = later and goes_on and not ended and not self._due
        if self._published.bundles and not waits:
            self._show_index()
        self.ended = ended

    @property
    def _overdue(self) -> bool:
        """True if an index has waited for too long."""
        if self._waiting is None or self.place.paid:
            return False
        least = _SHARE * self.uplink.seconds(len(self._published.text))
        return self.clock() - self._waiting >= max(INDEX_SECONDS, least)

    def _show_index(self) -> None:
        self.place.finish(self._published.text, self.uplink)
        self._since, self._due, self._waiting = 0, False, None

    def _opened(self) -> Publication:
        """Read the index, and compare it with the log. Raises like `publish`."""
        run = self.source.run()
        try:
            index = self.place.read_index(str(self.source.log))
        except MissingError:
            return Publication(self.source.log, run)
        except BadBundleError as error:
            raise WrongPlaceError(
                f"{self.place.url}: {error}; choose another place, or empty this one"
            ) from None
        if index.run != run:
            raise WrongPlaceError(
                f"{self.place.url}: has bundles of another run; choose another place"
            )
        head = index.bundles[-1].head
        self._tree, self._contents = Frontier(), Contents()
        for entry in self.source.read().entries[: head.size]:
            self._contents.skip([self._noted(entry, self._tree.size)[1]])
            self._tree.append(leaf_hash(entry.encode()))
        if Prefix(self._tree.size, self._tree.root.hex()) != head:
            raise WrongPlaceError(
                f"{self.place.url}: its head of {head.size} statements is not a prefix of this "
                "log; choose another place"
            )
        return index

    def _read(self) -> None:
        """Read the statements that are new in the log."""
        known = self._tree.size + len(self._lines)
        for number, entry in enumerate(self.source.read().entries[known:], known):
            self._lines.append(self._noted(entry, number))

    def _noted(self, entry: str, number: int) -> Line:
        """Parse entry `number` of the log, and note what later bundles need to know of it."""
        statement = s.opened(entry)[0]
        state = state_of(statement)
        if state is not None:
            self._states.add(state)
        elif statement.kind == s.ANCHOR:
            self._anchors.append(statement)
        self._absences.note(statement, number)
        return entry, statement

    def _grown(self, lines: Sequence[Line]) -> Frontier:
        """Return the tree over the published statements and `lines`."""
        tree = Frontier.of(self._tree.size, self._tree.roots)
        for entry, _ in lines:
            tree.append(leaf_hash(entry.encode()))
        return tree

    def _complete(self) -> int | None:
        """Return how many of the unpublished statements make complete rounds; None if none do."""
        bound: int | None = None
        for number, (_, statement) in enumerate(self._lines):
            if statement.kind != s.STEP:
                continue
            round_ = Step.of(statement).key.round
            if bound is None:
                bound = (round_ // self.every + 1) * self.every
            elif round_ >= bound:
                return number
        return None

    @property
    def _published(self) -> Publication:
        assert self._index is not None
        return self._index

    def _changed(self, last: bool) -> list[_Member]:
        """Return the files that are new or differ from those published, sorted by name."""
        before: dict[str, str] = {}
        for bundle in self._published.bundles:
            before |= bundle.files
        found = []
        complete = self.source.is_complete(self._states)
        for name, what in sorted(self.source.files(last, complete).items()):
            if isinstance(what, bytes):
                member, digest = _Member.of(name, what, named=True), sha256(what)
            else:
                member = _Member(name, what.stat().st_size, partial(pieces, what), True)
                digest = sha256_of(what)
            if before.get(name) == digest:
                continue
            if not name.endswith(".safetensors") and member.size <= _SCANNED:
                content = b"".join(member.content())
                refuse_secret(name, content, self.source.secrets)
                self._tell_of_paths(name, content)
            found.append(member)
        return found

    def _tell_of_paths(self, name: str, content: bytes) -> None:
        """Say which values of a file are absolute paths; a line is said once."""
        paths = local_paths(name, content)
        line = SAID.format(name, ", ".join(paths))
        if paths and line not in self._told:
            self._told.add(line)
            self.tell(line)

    def _publish(self, end: int, ended: bool) -> None:
        """Publish the first `end` unpublished statements, in one bundle or several.

        `ended`: the run has ended; its files are published with the last statements.
        """
        lines = self._lines[:end]
        last = ended and end == len(self._lines)
        stores, told = self.source.open_stores(), [statement for _, statement in lines]
        objects, missing = self._contents.named(told, stores)
        self._check_missing(missing, told)
        if last and (missing or any(each.missing for each in self._published.bundles)):
            # The replay does not begin with theta_0, but with one of these states.
            more, _ = self._contents.named(self._anchors, stores, anchors=True)
            objects = sorted({*objects, *more}, key=lambda each: each.name)
        tree = self._grown(lines)
        members = self._changed(last)
        before = self._published.bundles[-1] if self._published.bundles else None
        until = before.until if before else ""
        objects = [each for each in objects if each.name > until]

        def content() -> Iterator[_Member]:
            yield from members
            for each in objects:
                yield _Member.of(*each.load(stores))

        self._send_all(content(), lines, tree, missing=len(missing), last=last)
        self._contents.skip(told)
        self._tree = tree
        del self._lines[: len(lines)]

    def _check_missing(self, missing: Mapping[str, int], told: Sequence[s.Statement]) -> None:
        """Raise `RecordError` unless objects that `told` names may be missing for good."""
        config = self.source.found.config
        assert config is not None
        late = [
            digest
            for digest, at in missing.items()
            if not self._absences.excuse(told[at], self._tree.size + at, config)
        ]
        if late:
            more = f" and {len(late) - 1} more" if len(late) > 1 else ""
            raise RecordError(
                f"{late[0][:12]}…{more}: payloads that the log names are in no store; name the "
                "sites' run folders with --from, or their stores with --store"
            )

    def _send_all(
        self, content: Iterator[_Member], lines: Sequence[Line], tree: Frontier, *, missing: int,
        last: bool,
    ) -> None:  # fmt: skip
        """Send bundles with all of `content`; the last of them also has the statements."""
        with BundleFile(self.source.folder) as file:
            until = ""
            for member in content:
                if file.size and file.size + member.size > bundle_file.BUNDLE_SIZE:
                    head = Prefix(self._tree.size, self._tree.root.hex())
                    self._send(file, file.finish(self._next, head, toward=tree.size, until=until))
                    file.clear()
                file.add(member.name, member.size, member.content(), member.named)
                until = "" if member.named else member.name
            for name, data in self._log_files(lines, tree):
                file.add(name, len(data), iter((data,)))
            head = Prefix(tree.size, tree.root.hex())
            self._send(file, file.finish(self._next, head, missing=missing, last=last))

    @property
    def _next(self) -> int:
        """Number of the next bundle."""
        return len(self._published.bundles)

    def _log_files(self, lines: Sequence[Line], tree: Frontier) -> Iterator[tuple[str, bytes]]:
        """Iterate over (name, content) of the log's files of a bundle with `lines`."""
        key = self.source.log
        head = LogCheckpoint(key.name, tree.size, tree.root)
        yield f"record/{CHECKPOINT}", sign_note(head.text, key.name, self.source.private).encode()
        yield f"record/{PUBLIC}", f"{key}\n".encode()
        if lines:
            data = "".join(f"{entry}\n" for entry, _ in lines).encode()
            refuse_secret("record/statements.jsonl", data, self.source.secrets)
            yield STATEMENTS.format(self._next), data

    def _send(self, file: BundleFile, bundle: Bundle) -> None:
        """Upload a bundle, then the index that names it if that is due."""
        bundle, size = self.place.send(file, bundle, self.uplink)
        self.size += size
        signer = s.Signer(self.source.private)
        grown = Publication(
            self._published.log, self._published.run,
            [*self._published.bundles], [*self._published.lines],
        )  # fmt: skip
        grown.add(bundle, signer)
        text = grown.text
        since = self._since + bundle.size
        due = since >= len(text)
        self.place.send_index(text, due, self.uplink)
        self._since, self._due = 0 if due else since, self._due or due
        if due:
            self._waiting = None
        elif self._waiting is None:
            self._waiting = self.clock()
        self._index = grown
        self.bundles += 1
