"""The log of a run: one signed statement per line, in a Merkle tree with signed checkpoints.

`statements.jsonl` holds the envelopes, a leaf each; `checkpoint` the newest signed checkpoint;
`log.pub` the key that has signed it. An entry is written before the checkpoint that covers it, so a
crash between the two leaves entries that the next start covers. The death of the machine may take
what was appended since the last `sync` or `cover`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
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
from dilocox.utils.storage import sync_folder, unsafe_reason

ENTRIES, CHECKPOINT, PUBLIC = "statements.jsonl", "checkpoint", "log.pub"


@dataclass(frozen=True)
class LogContent:
    """What a log's folder holds. Nothing of it is checked but its form."""

    entries: Sequence[str]
    note: str
    """The signed checkpoint."""
    public: str
    """The text of `log.pub`."""


@dataclass(frozen=True)
class Mark:
    """A place in a log, and the tree of what is before it."""

    size: int
    """Statements."""
    offset: int
    """Bytes of `statements.jsonl`."""
    roots: list[bytes]
    """See `Frontier.roots`."""


class LogWriter:
    """Appends to the log in a folder. One process at a time; `cover` in one thread at a time, which
    may be another than that of `append` and `sync`."""

    def __init__(
        self,
        folder: Path,
        origin: str,
        key: Ed25519PrivateKey,
        take: Callable[[str], None] = lambda entry: None,
        mark: Mark | None = None,
    ) -> None:
        """Begin a log, or go on with the one in `folder`.

        `take` gets every entry that is there, in order; with a `mark`, those behind it. Raises
        `RecordError` if what is there is not what `key` has signed, or not what was there at the
        `mark`, what `take` raises, and `OSError`.
        """
        self._folder, self._origin, self._key = folder, origin, key
        self.public = NoteKey(origin, key.public_key().public_bytes_raw())
        folder.mkdir(parents=True, exist_ok=True)
        self._tree = _recovered(folder, self.public, take, mark)
        self._file = AppendFile(folder / ENTRIES, durable=True)
        sync_folder(folder)
        _replace(folder / PUBLIC, f"{self.public}\n")
        self._covered, self._note = -1, ""
        self._lock = threading.Lock()
        self.cover()

    @property
    def size(self) -> int:
        """Statements so far."""
        return self._tree.size

    def mark(self) -> Mark:
        """The end of the log as it is now."""
        with self._lock:
            return Mark(self._tree.size, self._file.length, self._tree.roots)

    def append(self, entry: str) -> None:
        """Add a statement; it counts once a checkpoint covers it. Raises `OSError`; then the log
        holds nothing of it, and it may be added again."""
        data = entry.encode()
        with self._lock:
            self._file.append(data + b"\n")
            self._tree.append(leaf_hash(data))

    def lines(self) -> Iterator[str]:
        """All entries, one after the other, as they lie on the disk. Raises `OSError`."""
        with (self._folder / ENTRIES).open(encoding="utf-8") as file:
            for line in file:
                yield line.removesuffix("\n")

    def sync(self) -> None:
        """Return when all that was appended will survive a power cut. Raises `OSError`."""
        self._file.sync()

    def cover(self) -> str:
        """Sign what is there now; the signed checkpoint. Raises `OSError`."""
        with self._lock:
            checkpoint = LogCheckpoint(self._origin, self._tree.size, self._tree.root)
        if self._covered != checkpoint.size:
            # A checkpoint that is there after a power cut must find its entries there.
            self.sync()
            self._note = sign_note(checkpoint.text, self._origin, self._key)
            _replace(self._folder / CHECKPOINT, self._note)
            self._covered = checkpoint.size
        return self._note

    def close(self) -> None:
        """Cover what is there and let go of it. Raises `OSError`."""
        try:
            self.cover()
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the log as it is."""
        self._file.close()


def read_log(folder: Path) -> LogContent:
    """What is in a log's folder. Raises `RecordError` if files are missing or cut short."""
    texts = {name: read_text(folder / name) for name in (ENTRIES, CHECKPOINT, PUBLIC)}
    lines = texts[ENTRIES].split("\n")
    if lines.pop() != "":
        raise RecordError(f"{folder / ENTRIES}: its last line was cut short")
    return LogContent(lines, texts[CHECKPOINT], texts[PUBLIC].strip())


def open_log(folder: Path) -> LogContent:
    """As `read_log`, with entries that are read from the disk when somebody goes through them."""
    note, public = read_text(folder / CHECKPOINT), read_text(folder / PUBLIC)
    return LogContent(FileEntries(folder / ENTRIES), note, public.strip())


def read_covered(folder: Path, key: NoteKey) -> LogContent:
    """The part of a log that is being written which its newest checkpoint covers, with entries
    that are read from the disk as those of `open_log`.

    Raises `RecordError` as `read_log` does, and for a checkpoint that `key` has not signed.
    """
    note = read_text(folder / CHECKPOINT)  # first: what it covers is there
    size = LogCheckpoint.parse(open_note(note, key)).size
    return LogContent(FileEntries.covered(folder / ENTRIES, size), note, str(key))


def read_text(path: Path) -> str:
    """A file of a record. Raises `RecordError`."""
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
    """The checkpoint of a log that holds exactly what `key` has signed.

    Raises `RecordError` if the signature, the size or the root is another.
    """
    checkpoint = LogCheckpoint.parse(open_note(content.note, key))
    if checkpoint.origin != key.name:
        raise RecordError(f"the checkpoint is of log {checkpoint.origin!r}, not {key.name!r}")
    count = len(content.entries)
    if count != checkpoint.size:
        how = "cut" if count < checkpoint.size else "added to"
        added = count > checkpoint.size
        goes_on = " (as that of a run that goes on is: wait for its end)" if added else ""
        raise RecordError(
            f"the log holds {count} statements, its signed checkpoint {checkpoint.size}: it was "
            f"{how} after it was signed{goes_on}"
        )
    if Frontier(leaves_of(content.entries)).root != checkpoint.root:
        raise RecordError("the log's root is not the signed one: a statement was changed or moved")
    return checkpoint


def as_signed(content: LogContent, key: NoteKey) -> Iterator[str]:
    """The entries of a log that `check_log` has found to be what `key` has signed.

    They are hashed once more as they are read: what is judged is what was signed. Raises
    `RecordError` after the last one if the log was changed meanwhile.
    """
    tree = Frontier()
    for entry in content.entries:
        tree.append(leaf_hash(entry.encode()))
        yield entry
    if tree.root != LogCheckpoint.parse(open_note(content.note, key)).root:
        raise RecordError("the log was changed while it was read")


def check_grown(content: LogContent, key: NoteKey, seen: str) -> LogCheckpoint:
    """The checkpoint in the note `seen`, kept from an earlier look, of which this log is a
    continuation.

    Raises `RecordError` if it is not: the log was cut back, or another was put in its place.
    """
    earlier = LogCheckpoint.parse(open_note(seen, key))
    if earlier.size > len(content.entries):
        raise RecordError(
            f"the log held {earlier.size} statements when it was seen, now {len(content.entries)}: "
            "it was cut back"
        )
    if Frontier(leaves_of(content.entries[: earlier.size])).root != earlier.root:
        raise RecordError(
            f"the log's first {earlier.size} statements are not those that were seen: the same "
            "key has signed two courses (the seen checkpoint and this one are the evidence)"
        )
    return earlier


def leaves_of(entries: Iterable[str]) -> Iterator[bytes]:
    """Hashes of a log's statements."""
    return (leaf_hash(entry.encode()) for entry in entries)


def _recovered(
    folder: Path, key: NoteKey, take: Callable[[str], None], mark: Mark | None
) -> Frontier:
    """The tree of a log to go on with; what a crash has left half written is taken away."""
    path = folder / ENTRIES
    if not path.exists():
        if (folder / CHECKPOINT).exists():
            raise RecordError(f"{path}: missing, though a checkpoint of it is there; put it back")
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
            raise RecordError(f"{path}: no statement ends where a mark is")
        for line in file:
            # Blocks that a power cut kept from being written read as zeros: no entry has any.
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
    """Whether a line ends after so many bytes, which are read over."""
    file.seek(length - 1)
    return file.read(1) == b"\n"


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        # On a full disk the remains would be in the way of the next try.
        with contextlib.suppress(OSError):
            part.unlink()
        raise
