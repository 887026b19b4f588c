"""A storage, at a folder or fsspec URL, that may be dead, slow or dishonest.

Every call has a time limit, whatever the storage's own library does: a server that accepts a
connection and then says nothing must not hold a command up for ever.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from pathlib import Path
from typing import TypeVar

import aiohttp
import fsspec

from dilocox.errors import RecordError
from dilocox.record.bundles.publication import INDEX, INDEX_BYTES, INDEX_USUAL, Bundle
from dilocox.record.log import bounded_reads
from dilocox.record.log.blob_store import MissingError
from dilocox.utils.backoff import backoff_delays
from dilocox.utils.plain_text import plain
from dilocox.utils.secret_text import secret_problem
from dilocox.utils.storage import (
    is_local,
    opened,
    replace_file,
    run_in_thread,
    sync_folder,
    unsafe_reason,
)

CALL_SECONDS = 60.0
"""Seconds that a call may take, beside the time for its bytes."""
SLOWEST = 50_000
"""Bytes per second of the slowest link that is waited for."""
WRITTEN = "written"
_CUT = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, TimeoutError)
_DENIED = (401, 403)
_FIRST, _MOST = 0.5, 10.0
"""Seconds of the first and of the longest pause before a call is repeated."""

AT_ONCE = 4
"""Parts that are moved at once: a single request does not fill a long link."""

S = TypeVar("S")
T = TypeVar("T")


WHOLE = frozenset({
    "file", "local", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "ocilake",
    "tos", "tosfs", "lakefs", "hf",
})  # fmt: skip
"""Protocols of storage that shows a file only when it is whole: folders here, object storage."""


class DeniedError(RecordError):
    """The storage refuses access; some refuse access to files that do not exist."""


class WrongPlaceError(RecordError):
    """A place that a run cannot be published to, however often it is tried."""

    permanent = True


class Place:
    """Reads and writes small files below a URL."""

    def __init__(self, url: str, patience: float = 0.0, seconds: float = CALL_SECONDS) -> None:
        """Open the storage; nothing is read yet.

        Args:
            url: Folder, or URL that fsspec knows.
            patience: Seconds for which a failing call is repeated.
            seconds: Time limit of one call, beside the time for its bytes.

        Raises:
            RecordError: fsspec does not know the URL, or its package is not installed, or the URL
                holds a password.
        """
        self.url = url.rstrip("/") or url
        refuse_password(url)
        try:
            # Without a cache of listings: another process may write at the same time.
            self._files, root = opened(self.url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise RecordError(
                f"{self.url}: cannot be opened ({_reason(error)}); give a URL that fsspec knows, "
                "and install the package for it (s3://: pip install 'dilocox[s3]')"
            ) from None
        self._root = root.rstrip("/")
        self._local = is_local(self._files)
        self._patience, self._seconds = patience, seconds

    @classmethod
    def to_publish(cls, url: str, patience: float = 0.0) -> Place:
        """Open a storage for writing, with the arguments of the class.

        Raises `WrongPlaceError` if a reader could see a file there that is half written, and
        `RecordError` like the class.
        """
        refuse_password(url)
        protocol = (fsspec.core.split_protocol(url)[0] or "file").rpartition("::")[2]
        if protocol in fsspec.available_protocols() and protocol not in WHOLE:
            raise WrongPlaceError(
                f"{protocol}://: shows files that are half written, or cannot be written to; give "
                "--to object storage (s3://, gs://, abfs://) or a folder (file://), which may be "
                "mounted"
            )
        return cls(url, patience)

    @property
    def is_local(self) -> bool:
        """True if the storage is a folder on this machine."""
        return self._local

    def get(self, path: str, most: int, usual: int | None = None) -> bytes:
        """Return the bytes of a file of at most `most` bytes.

        `usual`: bytes for which the call gets time; None: `most`. Raises `MissingError` if the file
        does not exist, `DeniedError` if access is refused, and `RecordError` if the file is larger,
        or the storage fails.
        """

        def read() -> bytes:
            unsafe = unsafe_reason(Path(self._at(path)), Path(self._root)) if self._local else ""
            if unsafe:
                raise RecordError(f"{self.url}/{path}: {unsafe}; bundles are plain files")
            return bounded_reads.read(self._files, self._at(path), most)

        return self._call(read, path, "read", most if usual is None else usual)

    def put(self, path: str, data: bytes) -> None:
        """Write a file; a file of this name is replaced. Raises `RecordError`."""
        self._call(lambda: self._write(self._at(path), data), path, WRITTEN, len(data))

    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None if it does not exist. Raises `RecordError`."""

        def look() -> int | None:
            return int(self._files.info(self._at(path)).get("size") or 0)

        try:
            return self._call(look, path, "looked up", 0)
        except MissingError:
            return None

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _write(self, path: str, data: bytes) -> None:
        if not self._local:
            # Object storage shows a file only when it is whole.
            self._files.pipe_file(path, data)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data)
        sync_folder(target.parent)

    def get_index(self) -> bytes:
        """Return the index of a published run. Raises like `get`."""
        return self.get(INDEX, INDEX_BYTES, INDEX_USUAL)

    def get_part(self, bundle: Bundle, number: int) -> bytes:
        """Return a part of a bundle. Raises like `get`, and `TooLargeError` for a larger one."""
        return self.get(bundle.paths()[number], bundle.part_size)

    def _call(self, action: Callable[[], T], path: str, done: str, moved: int) -> T:
        """Call `action` with a time limit; repeat it for the time of `patience`."""
        limit = self._seconds + moved / SLOWEST
        return patiently(action, f"{self.url}/{path}", done, limit, self._patience)


def patiently(action: Callable[[], T], where: str, done: str, limit: float, patience: float) -> T:
    """Call `action` with a time limit and return its result; repeat it while it fails.

    Args:
        action: Calls a storage. Its `RecordError` is not repeated.
        where: The file, or the server, for messages.
        done: What the call does to it, such as "read".
        limit: Seconds for one call.
        patience: Seconds for which a failing call is repeated.

    Raises:
        MissingError: The file does not exist.
        DeniedError: Access is refused.
        RecordError: The storage fails.
    """

    def once() -> T:
        try:
            return run_in_thread(action).result(limit)
        except LateError:
            raise _FailedError(f"no answer for {limit:.0f} s") from None
        except RecordError:
            raise
        except Exception as error:  # every kind of storage has errors of its own
            if isinstance(error.__cause__, _CUT):
                # fsspec says of a dead web server that its files are not found.
                raise _FailedError(_reason(error.__cause__)) from None
            if isinstance(error, FileNotFoundError) and done != WRITTEN:
                raise MissingError(f"{where}: not there") from None
            if isinstance(error, PermissionError) or getattr(error, "status", 0) in _DENIED:
                reason = _reason(error)
                raise DeniedError(f"{where}: cannot be {done} ({reason})") from None
            raise _FailedError(_reason(error)) from None

    end = time.monotonic() + patience
    for pause in backoff_delays(_FIRST, _MOST):
        try:
            return once()
        except _FailedError as error:
            if time.monotonic() + pause > end:
                raise RecordError(f"{where}: cannot be {done} ({error})") from None
        time.sleep(pause)
    raise AssertionError("pauses never end")


def in_order(
    call: Callable[[S], T], items: Iterable[S], at_once: int = AT_ONCE
) -> Generator[T, None, None]:
    """Call `call` for each item, several at once; yield the results in the items' order.

    At most `at_once` items are taken before their results are used. After an exception of `call`,
    which is raised in its place, no further calls begin.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(at_once, "storage") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(call, item))
                if len(waiting) >= at_once:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()


def refuse_password(url: str) -> None:
    """Raise `RecordError` if `url` holds a password, or what may be a key."""
    problem = secret_problem(url)
    if problem is not None:
        raise RecordError(problem)


class _FailedError(Exception):
    """A call failed in a way that may pass."""


def _reason(error: BaseException) -> str:
    """Return one short line on an error of a storage's library."""
    text = plain(str(getattr(error, "strerror", None) or error) or type(error).__name__)
    return re.sub(r"\s+", " ", text)[:200]
