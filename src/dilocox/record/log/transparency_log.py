"""The log of a run: one signed statement per line, in a Merkle tree with signed checkpoints.

Files: `statements.jsonl` holds one envelope per line, each a leaf of the tree. `checkpoint` holds
the newest signed checkpoint, and `log.pub` the public key that has signed it. An entry is written
before the checkpoint that covers it, so after a crash between the two the next start covers the
entry. If the machine dies, entries appended since the last `sync` or `cover` may be lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.errors import RecordError
from dilocox.record.log.entries import FileEntries
from dilocox.record.log.merkle import EMPTY, Frontier, leaf_hash
from dilocox.record.log.signed_note import LogCheckpoint, NoteKey, open_note, sign_note
from dilocox.utils.append_file import AppendFile
from dilocox.utils.storage import replace_file, sync_folder, unsafe_reason

ENTRIES, CHECKPOINT, PUBLIC = "statements.jsonl", "checkpoint", "log.pub"


@dataclass(frozen=True)
class LogContent:
    """The contents of a log's folder. Only their form is checked, no signature."""

    entries: Sequence[str]
    note: str
    """The signed checkpoint."""
    public: str
    """The text of `log.pub`."""


@dataclass(frozen=True)
class Mark:
    """A position in a log, and the Merkle tree of the statements before it."""

    size: int
    """Number of statements before the position."""
    offset: int
    """Bytes of `statements.jsonl` before the position."""
    roots: list[bytes]
    """The tree's `Frontier.roots`."""


class LogWriter:
    """Appends to the log in a folder. Only one process may write a log at a time.

    Only one thread at a time may call `cover`; another thread may call `append` and `sync`.
    """

    def __init__(
        self,
        folder: Path,
        origin: str,
        key: Ed25519PrivateKey,
        take: Callable[[str], None] = lambda entry: None,
        mark: Mark | None = None,
    ) -> None:
        """Begin a log, or continue the log in `folder`.

        Args:
            folder: The log's folder; created if missing.
            origin: Name of the log, in its checkpoints.
            key: Key that signs the checkpoints.
            take: Called with every existing entry in order; with a `mark`, with entries after it.
            mark: A position of which the caller has kept the state; earlier entries are not read.

        Raises:
            RecordError: The existing log is not the one that `key` has signed, or does not match
                `mark`. An exception of `take` is raised as it is.
            OSError: A file cannot be read or written.
        """
        self._folder, self._origin, self._key = folder, origin, key
        self.public = NoteKey(origin, key.public_key().public_bytes_raw())
        folder.mkdir(parents=True, exist_ok=True)
        self._tree = _recovered(folder, self.public, take, mark)
        self._file = AppendFile(folder / ENTRIES, durable=True)
        sync_folder(folder)
        _write_key(folder / PUBLIC, f"{self.public}\n".encode())
        self._covered, self._note = LogCheckpoint(origin, -1, EMPTY), ""
        self._lock = threading.Lock()
        self.before_sync: Callable[[], None] = lambda: None
        """Called, in any thread, before entries become durable: so must be what they rely on."""
        self.cover()

    @property
    def size(self) -> int:
        """Number of statements in the log."""
        return self._tree.size

    @property
    def covered(self) -> LogCheckpoint:
        """The newest checkpoint that was signed."""
        return self._covered

    def mark(self) -> Mark:
        """Return the current end of the log."""
        with self._lock:
            return Mark(self._tree.size, self._file.length, self._tree.roots)

    def append(self, entry: str) -> None:
        """Append a statement. A statement counts once a checkpoint covers it.

        Raises `OSError`. After an error the log does not hold any part of the statement, and the
        caller may append it again.
        """
        data = entry.encode()
        with self._lock:
            self._file.append(data + b"\n")
            self._tree.append(leaf_hash(data))

    def lines(self) -> Iterator[str]:
        """Iterate over all entries, read from the disk. Raises `OSError`."""
        with (self._folder / ENTRIES).open(encoding="utf-8") as file:
            for line in file:
                yield line.removesuffix("\n")

    def sync(self) -> None:
        """Block until all appended entries would survive a power cut. Raises `OSError`."""
        self.before_sync()
        self._file.sync()

    def cover(self) -> str:
        """Sign a checkpoint of all current entries, and return it. Raises `OSError`."""
        with self._lock:
            checkpoint = LogCheckpoint(self._origin, self._tree.size, self._tree.root)
        if self._covered.size != checkpoint.size:
            # Entries must be durable before the checkpoint that covers them.
            self.sync()
            self._note = sign_note(checkpoint.text, self._origin, self._key)
            replace_file(self._folder / CHECKPOINT, self._note.encode())
            self._covered = checkpoint
        return self._note

    def close(self) -> None:
        """Sign a last checkpoint and close the files. Raises `OSError`."""
        try:
            self.cover()
        finally:
            self.release()

    def release(self) -> None:
        """Close the files without a checkpoint."""
        self._file.close()


def read_log(folder: Path) -> LogContent:
    """Read a log's folder into memory. Raises `RecordError` if files are missing or cut short."""
    texts = {name: read_text(folder / name) for name in (ENTRIES, CHECKPOINT, PUBLIC)}
    lines = texts[ENTRIES].split("\n")
    if lines.pop() != "":
        raise RecordError(f"{folder / ENTRIES}: its last line was cut short")
    return LogContent(lines, texts[CHECKPOINT], texts[PUBLIC].strip())


def open_log(folder: Path) -> LogContent:
    """Open a log's folder like `read_log`, but read entries from the disk on each pass."""
    note, public = read_text(folder / CHECKPOINT), read_text(folder / PUBLIC)
    return LogContent(FileEntries(folder / ENTRIES), note, public.strip())


def read_covered(folder: Path, key: NoteKey, note: str | None = None) -> LogContent:
    """Open the part of a growing log that a checkpoint covers.

    Entries are read from the disk on each pass, as with `open_log`. Raises `RecordError` like
    `read_log`, and if `key` has not signed the checkpoint.

    `note`: the signed checkpoint; None: the newest one of the folder.
    """
    # Read the checkpoint first: the entries that it covers are on the disk already.
    note = read_text(folder / CHECKPOINT) if note is None else note
    size = LogCheckpoint.parse(open_note(note, key)).size
    return LogContent(FileEntries.covered(folder / ENTRIES, size), note, str(key))


def read_text(path: Path) -> str:
    """Read a text file of a record.

    Raises `RecordError` if the path is not a plain file or cannot be read.
    """
    reason = unsafe_reason(path, path.parent)
    if reason:
        raise RecordError(f"{path}: {reason}; a record is plain files")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path}: missing; was this run recorded?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None


def check_log(content: LogContent, key: NoteKey) -> LogCheckpoint:
    """Check that a log holds exactly the entries that `key` has signed; return its checkpoint.

    Raises `RecordError` if the signature, the origin, the size or the root does not match.
    """
    checkpoint = LogCheckpoint.parse(open_note(content.note, key))
    if checkpoint.origin != key.name:
        raise RecordError(f"the checkpoint is of log {checkpoint.origin!r}, not {key.name!r}")
    count = len(content.entries)
    if count != checkpoint.size:
        how = "cut" if count < checkpoint.size else "added to"
        added = count > checkpoint.size
        goes_on = " (the log of a run in progress grows: wait for the end)" if added else ""
        raise RecordError(
            f"the log holds {count} statements, its signed checkpoint {checkpoint.size}: it was "
            f"{how} after it was signed{goes_on}"
        )
    if Frontier(leaves_of(content.entries)).root != checkpoint.root:
        raise RecordError("the log's root is not the signed one: a statement was changed or moved")
    return checkpoint


def as_signed(content: LogContent, key: NoteKey) -> Iterator[str]:
    """Iterate over the entries of a log that `check_log` has accepted, hashing them again.

    So the caller judges the same bytes that were signed. Raises `RecordError` after the last entry
    if the log was changed after `check_log`.
    """
    tree = Frontier()
    for entry in content.entries:
        tree.append(leaf_hash(entry.encode()))
        yield entry
    if tree.root != LogCheckpoint.parse(open_note(content.note, key)).root:
        raise RecordError("the log was changed while it was read")


def check_grown(content: LogContent, key: NoteKey, seen: str) -> LogCheckpoint:
    """Check that a log continues the log of an earlier checkpoint; return that checkpoint.

    `seen` is the earlier signed checkpoint. Raises `RecordError` if the log was cut back or
    replaced since.
    """
    earlier = LogCheckpoint.parse(open_note(seen, key))
    if earlier.size > len(content.entries):
        raise RecordError(
            f"the log held {earlier.size} statements when it was seen, now {len(content.entries)}: "
            "it was cut back"
        )
    if Frontier(leaves_of(content.entries[: earlier.size])).root != earlier.root:
        raise RecordError(
            f"the log's first {earlier.size} statements differ from the seen log: the same key has "
            "signed two different logs (the seen checkpoint and this one are the evidence)"
        )
    return earlier


def leaves_of(entries: Iterable[str]) -> Iterator[bytes]:
    """Iterate over the Merkle leaf hashes of a log's entries."""
    return (leaf_hash(entry.encode()) for entry in entries)


def _write_key(path: Path, text: bytes) -> None:
    """Write `log.pub`, unless it has this text: its time is the start of a coordinator."""
    if not (path.is_file() and path.read_bytes() == text):
        replace_file(path, text)


def _recovered(
    folder: Path, key: NoteKey, take: Callable[[str], None], mark: Mark | None
) -> Frontier:
    """Return the tree of the log to continue, and cut off a partly written entry after a crash."""
    path = folder / ENTRIES
    if not path.exists():
        if (folder / CHECKPOINT).exists():
            raise RecordError(f"{path}: missing, but its checkpoint is there; put the file back")
        return Frontier()
    covered = LogCheckpoint(key.name, 0, EMPTY)
    if (folder / CHECKPOINT).exists():
        note = (folder / CHECKPOINT).read_text(encoding="utf-8")
        covered = LogCheckpoint.parse(open_note(note, key))
    tree, length = Frontier(), 0
    if mark is not None:
        tree, length = Frontier.of(mark.size, mark.roots), mark.offset
    root = tree.root if tree.size == covered.size else None
    with path.open("rb") as file:
        if length and not _ends_line(file, length):
            raise RecordError(f"{path}: no statement ends at the position of the mark")
        for line in file:
            # Blocks that a power cut kept from being written read as zeros. No entry has a zero
            # byte.
            if b"\0" in line or not line.endswith(b"\n"):
                break
            length += len(line)
            tree.append(leaf_hash(line[:-1]))
            if tree.size == covered.size:
                root = tree.root
            take(line[:-1].decode())
        whole = os.fstat(file.fileno()).st_size
    if root != covered.root:
        raise RecordError(
            f"{path}: not what its checkpoint was signed for; put back the files of this run"
        )
    if whole != length:
        with path.open("r+b") as file:
            file.truncate(length)
    return tree


def _ends_line(file: BinaryIO, length: int) -> bool:
    """Return True if a line ends after `length` bytes, and move `file` to that position."""
    file.seek(length - 1)
    return file.read(1) == b"\n"
