"""Fetches a run behind a URL to this machine for verification, except its store.

The URL belongs to a stranger, so every download has a limit. The limit of the log follows from the
number of statements in its checkpoint, the limit of the model from the sizes in the signed states.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dilocox.errors import RecordError
from dilocox.record.bundles.place import refuse_password
from dilocox.record.log import bounded_reads
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import FOLDER
from dilocox.record.log.blob_store import DOCUMENT_BYTES, Store, Stores
from dilocox.record.log.cosigned import COSIGNED, MOST
from dilocox.record.log.signed_note import LogCheckpoint
from dilocox.record.log.state_statements import State
from dilocox.record.log.transparency_log import CHECKPOINT, ENTRIES, PUBLIC, open_log, read_text
from dilocox.utils.storage import opened

LOG_FILES = tuple(f"record/{name}" for name in (CHECKPOINT, PUBLIC, ENTRIES))
"""Files without which nothing can be verified."""
METRICS = "metrics.jsonl"
AUDITS, WITNESSED = f"record/{FOLDER}", f"record/{COSIGNED}"
NOTE_BYTES = 1 << 16
"""Limit in bytes of the checkpoint, and of the public key."""
STATEMENT_BYTES = 1 << 16
"""Bytes per statement in the limit of the log, and in that of `metrics.jsonl`."""
SMALL_BYTES = 1 << 24
"""Limit in bytes of the run file and of each verdict. The limits of the log and of `metrics.jsonl`
are this much plus `STATEMENT_BYTES` for each statement."""
VERDICTS = 10_000
MODEL_FILES = 10_000
BESIDE_WEIGHTS = 1 << 28
"""Limit in bytes of the model's files other than weights, such as tokenizer and settings."""
LAST = 100_000
"""Number of a log's last statements that are searched for the final states."""


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """Yield a temporary folder with the log, the run file and the model of the run at `url`.

    The store is not fetched. Raises `RecordError` if the run cannot be fetched, or if its files are
    larger or more than the record allows.
    """
    refuse_password(url)
    with tempfile.TemporaryDirectory(prefix="dilocox-verify-") as place:
        folder = Path(place)
        try:
            files, root = opened(url.rstrip("/"))
            _fetch(_Remote(files, root, folder), url)
        except (OSError, ValueError, ImportError) as error:
            raise RecordError(f"{url}: cannot be fetched ({error})") from None
        yield folder


@contextmanager
def fetched_log(url: str) -> Iterator[Path]:
    """Yield a temporary folder with the log alone of the run at `url`. Raises like `fetched`."""
    refuse_password(url)
    with tempfile.TemporaryDirectory(prefix="dilocox-log-") as place:
        try:
            files, root = opened(url.rstrip("/"))
            _fetch_log(_Remote(files, root, Path(place)))
        except (OSError, ValueError, ImportError) as error:
            raise RecordError(f"{url}: cannot be fetched ({error})") from None
        yield Path(place)


class _Remote:
    """The files of a remote run, and the folder that they are copied to."""

    def __init__(self, files: Any, root: str, folder: Path) -> None:
        self._files, self._root, self.folder = files, root, folder

    def copy(self, path: str, most: int) -> int:
        """Copy a file of at most `most` bytes; return its number of bytes."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(target.parent).free // 2
        return bounded_reads.copy(self._files, f"{self._root}/{path}", target, min(most, room))

    def has(self, path: str) -> bool:
        """Return True if the file or folder exists."""
        return bool(self._files.exists(f"{self._root}/{path}"))

    def names(self, path: str, most: int) -> list[tuple[str, bool]]:
        """List a folder as (name, is a folder); raise `RecordError` for more than `most` names."""
        found = bounded_reads.names(self._files, f"{self._root}/{path}") if self.has(path) else []
        if len(found) > most:
            raise RecordError(f"{self._root}/{path}: names {len(found):,} files, not {most:,}")
        return found


def _fetch_log(remote: _Remote) -> int:
    """Fetch the log; return the limit of its bytes."""
    for name in (CHECKPOINT, PUBLIC):
        remote.copy(f"record/{name}", NOTE_BYTES)
    log = SMALL_BYTES + STATEMENT_BYTES * _statements(remote.folder)
    remote.copy(f"record/{ENTRIES}", log)
    return log


def _fetch(remote: _Remote, url: str) -> None:
    log = _fetch_log(remote)
    for name, most in (("run.toml", SMALL_BYTES), (METRICS, log)):
        if remote.has(name):
            remote.copy(name, most)
    for name, _ in remote.names(AUDITS, VERDICTS):
        remote.copy(f"{AUDITS}/{name}", SMALL_BYTES)
    for name, _ in remote.names(WITNESSED, MOST):
        remote.copy(f"{WITNESSED}/{name}", NOTE_BYTES)
    names = remote.names("model", MODEL_FILES)
    left = _weights(remote.folder, url) + BESIDE_WEIGHTS if names else 0
    for name, is_folder in names:
        if is_folder:  # the folder itself is what `verify` judges
            (remote.folder / "model" / name).mkdir(parents=True, exist_ok=True)
        else:
            left -= remote.copy(f"model/{name}", left)


def _statements(folder: Path) -> int:
    """Return the log's number of statements by its checkpoint, without checking its signature."""
    text, _, _ = read_text(folder / "record" / CHECKPOINT).partition("\n\n")
    try:
        return LogCheckpoint.parse(text + "\n").size
    except RecordError:  # the claim `log` reports the error
        return 0


def _weights(folder: Path, url: str) -> int:
    """Return the bytes of a published model by the final states, without checking signatures.

    Returns the free bytes of the disk if there is no final state, or if no list of a stage's
    tensors at `url` can be used.
    """
    try:
        size = _signed_bytes(folder, url)
    except RecordError:  # the claims on the log report the error
        size = 0
    return size or shutil.disk_usage(folder).free


def _signed_bytes(folder: Path, url: str) -> int:
    from dilocox.record.verify.replay import read_listing

    entries = open_log(folder / "record").entries[-LAST:]
    get = Stores([Store(f"{url.rstrip('/')}/record/store")], most=DOCUMENT_BYTES).get
    sizes: dict[int, int] = {}
    for number, line in enumerate(entries):
        statement = s.opened(line)[0]
        if statement.kind != s.CHECKPOINT or statement.predicate.get("kind") != "final":
            continue
        state = State.of(statement, number)
        sizes.setdefault(state.stage, 0)
        forms = [(state.root, state.listing), *filter(None, [state.published])]
        for root, listing in forms:
            with contextlib.suppress(RecordError):  # another site's list gives the size
                size = sum(each.size for each in read_listing(get, listing, root))
                sizes[state.stage] = max(size, sizes.get(state.stage, 0))
    return sum(sizes.values()) if all(sizes.values()) else 0
