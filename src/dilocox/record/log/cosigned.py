"""Cosigned checkpoints beside a log: `record/cosigned/`, the newest one of each witness.

A file is a checkpoint with the log's signature and the witness's cosignature. Whoever can write the
folder can remove a file; nobody can make one up.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.log.signed_note import (
    LogCheckpoint,
    NoteKey,
    WitnessKey,
    cosigned_at,
    open_note,
    signed_only,
)
from dilocox.record.log.transparency_log import read_text
from dilocox.utils.storage import replace_file

COSIGNED = "cosigned"
"""Folder in the record."""
MOST = 1000
"""Most files of the folder that are read."""


def path_of(record: Path, witness: WitnessKey) -> Path:
    """File with the newest cosigned checkpoint of a witness."""
    name = hashlib.sha256(str(witness).encode()).hexdigest()[:32]
    return record / COSIGNED / f"{name}.note"


def keep(record: Path, log: NoteKey, witness: WitnessKey, note: str) -> bool:
    """Keep a cosigned checkpoint beside the log, unless a newer one is there.

    Only signature lines of the two keys are kept: a dishonest witness could add a line in the name
    of another one, and readers would take it for a forgery of the log's owner.

    Args:
        record: The record's folder.
        log: The log's key.
        witness: Who has cosigned.
        note: The cosigned checkpoint.

    Returns:
        Whether it was written.

    Raises:
        RecordError: The note is not signed by both.
        OSError: The file cannot be written.
    """
    note = signed_only(note, log, witness)
    fresh = _order(note, log, witness)
    path = path_of(record, witness)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            if path.exists() and _order(read_text(path), log, witness) >= fresh:
                return False
        except RecordError:
            pass  # a damaged file is replaced
        replace_file(path, note.encode())
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing: between look and write a newer file could come."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_all(record: Path) -> Iterator[tuple[Path, str]]:
    """Iterate over the files and their notes, which are not checked.

    Raises `RecordError` for what is not a plain file, or more than `MOST` files.
    """
    folder = record / COSIGNED
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    paths = [path for path in paths if not path.name.startswith(".")]
    if len(paths) > MOST:
        raise RecordError(f"{folder}: has {len(paths)} files, not {MOST} at most")
    for path in paths:
        yield path, read_text(path)


def _order(note: str, log: NoteKey, witness: WitnessKey) -> tuple[int, int]:
    time = cosigned_at(note, witness)
    if time is None:
        raise RecordError(f"the checkpoint is not cosigned by {witness.name}")
    return LogCheckpoint.parse(open_note(note, log)).size, time
