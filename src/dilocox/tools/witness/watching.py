"""Looks at logs where they lie, in a run's folder or behind a URL, and cosigns them.

A witness that reads the whole log needs no proof from anybody: it computes the roots itself.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.bundles.fetch import is_bundled
from dilocox.record.log import bounded_reads, cosigned
from dilocox.record.log.merkle import consistency_proof, root_of
from dilocox.record.log.signed_note import LogCheckpoint, NoteKey, open_note, split_note
from dilocox.record.log.transparency_log import (
    CHECKPOINT,
    ENTRIES,
    LogContent,
    check_log,
    leaves_of,
    read_covered,
    read_text,
)
from dilocox.tools.witness.requests import MOST_BYTES
from dilocox.tools.witness.witness import Witness
from dilocox.utils.storage import opened

STATEMENT_BYTES = 1 << 16
"""Bytes per statement in the limit of a log that is fetched."""


@dataclass(frozen=True)
class Seen:
    """What a look at a log has found."""

    origin: str
    size: int
    fresh: bool
    """False: the checkpoint was cosigned before."""
    file: Path
    """The cosigned checkpoint, in the witness's folder."""


def look(witness: Witness, place: str, beside: bool) -> Seen:
    """Cosign the newest checkpoint of the log at `place`.

    Args:
        witness: Who cosigns.
        place: A run's folder, or its URL as in fsspec.
        beside: Write the cosigned checkpoint beside the log, too; `place` is a folder.

    Raises:
        RecordError: The log cannot be read, is not one that the witness trusts, or does not
            continue what the witness has cosigned. Then the evidence is kept.
        OSError: The cosigned checkpoint cannot be kept.
    """
    with _record(place) as record:
        key = _trusted(witness, record / CHECKPOINT, place)
        newest = witness.folder.newest(key)
        note = read_text(record / CHECKPOINT)
        file = witness.folder.path(key.name)
        if newest is not None and LogCheckpoint.parse(open_note(note, key)) == newest[0]:
            if beside:
                _beside(witness, key, place)
            return Seen(key.name, newest[0].size, False, file)
        content = read_covered(record, key) if "://" not in place else _fetched(place, record, key)
        checkpoint = check_log(content, key)
        leaves = list(leaves_of(content.entries))
        size = newest[0].size if newest is not None else 0
        if newest is not None and checkpoint.size < size:
            raise RecordError(
                f"{place}: has {checkpoint.size} statements, and {size} were cosigned: an old "
                "copy, or the log was cut back"
            )
        if newest is not None and root_of(leaves[:size]) != newest[0].root:
            where = witness.folder.accuse(key.name, checkpoint.size, newest[1], content.note)
            raise RecordError(
                f"{place}: the log does not continue the {size} statements that were cosigned: its "
                f"key has signed two logs; both checkpoints are in {where}"
            )
        proof = consistency_proof(leaves, size) if size else []
        witness.add(size, proof, content.note)
        if beside:
            _beside(witness, key, place)
        return Seen(key.name, checkpoint.size, True, file)


def _beside(witness: Witness, key: NoteKey, place: str) -> None:
    newest = witness.folder.newest(key)
    if newest is not None:
        cosigned.keep(Path(place) / "record", key, witness.folder.key, newest[1])


def _trusted(witness: Witness, checkpoint: Path, place: str) -> NoteKey:
    """Return the key of the log, which the witness must know."""
    origin = LogCheckpoint.parse(split_note(read_text(checkpoint))[0]).origin
    key = witness.folder.trusted(origin)
    if key is None:
        raise RecordError(
            f"{place}: log {origin[:100]} is not one that this witness trusts; get its key from "
            "its owner, and add it with: dilocox witness trust FOLDER KEY"
        )
    return key


@contextlib.contextmanager
def _record(place: str) -> Iterator[Path]:
    """Yield the record's folder; of a URL, a temporary one with the checkpoint alone."""
    if "://" not in place:
        yield Path(place) / "record"
        return
    with tempfile.TemporaryDirectory(prefix="dilocox-witness-") as folder:
        _copy(place, CHECKPOINT, Path(folder), MOST_BYTES)
        yield Path(folder)


def _fetched(place: str, record: Path, key: NoteKey) -> LogContent:
    size = LogCheckpoint.parse(open_note(read_text(record / CHECKPOINT), key)).size
    _copy(place, ENTRIES, record, (size + 256) * STATEMENT_BYTES)
    return read_covered(record, key)


def _copy(place: str, name: str, folder: Path, most: int) -> None:
    try:
        files, root = opened(place.rstrip("/"))
        bounded_reads.copy(files, f"{root}/record/{name}", folder / name, most)
    except RecordError:
        raise
    except Exception as error:  # every kind of storage has errors of its own
        if isinstance(error, FileNotFoundError) and name == CHECKPOINT and _in_bundles(place):
            raise RecordError(
                f"{place}: was published in bundles, which a witness does not read; let the run "
                "ask (dilocox witness ask), or publish a folder (dilocox publish --to DIR)"
            ) from None
        reason = str(error) or type(error).__name__
        raise RecordError(f"{place}: cannot be read ({reason})") from None


def _in_bundles(place: str) -> bool:
    try:
        return is_bundled(place)
    except RecordError:  # the error that led here says more
        return False
