"""Content-addressed store: each object is found only by its SHA-256.

Objects are files `sha256/ab/cdef…` below a folder or any fsspec URL. Every read is hashed and
checked, so readers need not trust the operator of the store. The start states of each round are in
a store of their own below the main store. So old states can be removed without checking whether
other objects need the same bytes. Payloads of rounds that are removed later are in stores of their
own, too (see `dilocox.record.writer.windows`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from dilocox.errors import DilocoxError, RecordError
from dilocox.record.log import bounded_reads
from dilocox.record.log.digests import TensorDigest, digest_text, sha256
from dilocox.utils.storage import Room, is_local, opened, retry, sync_folder, unsafe_reason

log = logging.getLogger(__name__)

STATES = "states"
BF16 = ".bf16"
"""File name suffix of an fp32 tensor whose values are all exact in bf16. The file holds the upper
half of each value; the rest of the name is the SHA-256 of the fp32 bytes."""
_WINDOW_DEPTH = 6
"""Folders from the windows to a file: site, rank, round, `sha256`, its first digits."""
DOCUMENT_BYTES = 1 << 28
"""Limit in bytes of an object that is neither tensor nor payload, such as a list of tensors."""
PIECES = "pieces"
"""Folder of erasure-coded pieces (see `dilocox.record.pieces`), by root and number."""
SITES = "sites"
"""Folder in that of the pieces: a file for each site that writes to the store."""
WINDOWS = "windows"
"""Folder of payloads that are removed later, together with the start states of their replay."""


def piece_path(root: str, index: int) -> str:
    """Return the path of a piece's file below a store, with the arguments of `Store.put_piece`.

    Raises `ValueError` if `root` is malformed.
    """
    return f"{PIECES}/{digest_text(root)[:2]}/{root[2:]}/{index:03d}"


def states_of(where: str, round_: int) -> str:
    """Return the place of the store with a round's start states, below the store at `where`."""
    return f"{where.rstrip('/')}/{STATES}/{round_:08d}"


class Removals:
    """Removes old objects. Warns once if a store cannot: the store grows, but loses nothing."""

    def __init__(self, warn: Callable[[str], None], stays: str) -> None:
        self._warn, self._stays = warn, stays
        self._warned = False

    def attempt(self, remove: Callable[[], object]) -> None:
        """Call `remove`. A `RecordError` is logged, not raised; the first one is also a warning."""
        try:
            remove()
        except RecordError as error:
            log.error("record: %s", error)
            if not self._warned:
                self._warned = True
                with contextlib.suppress(DilocoxError):
                    self._warn(f"record: {error}; {self._stays}")


class Store:
    """One store, at a folder or fsspec URL.

    A write that fails over a network is retried for `patience` seconds. On a full disk a write
    waits for room (`room`). The constructor raises `RecordError` if the store cannot be opened.
    """

    def __init__(self, where: str, patience: float = 0.0, room: Room | None = None) -> None:
        self.where = where
        self.room = Room() if room is None else room
        """Shared with the stores below this one."""
        try:
            self._files, self._root = opened(where)
        except (ValueError, ImportError) as error:
            raise RecordError(
                f"record.store {where}: cannot be opened ({error}); give a folder, or a URL that "
                "fsspec knows"
            ) from None
        self._local = is_local(self._files)
        self._patience = patience
        self._index: dict[str, list[str]] | None = None

    @property
    def folder(self) -> Path | None:
        """The store's folder on this machine; None for storage elsewhere."""
        return Path(self._root).absolute() if self._local else None

    def path(self, digest: str) -> str:
        """Return the path of the object with this digest, 64 hex digits.

        Raises `RecordError` if `digest` is malformed.
        """
        try:
            digest_text(digest)
        except ValueError as error:
            raise RecordError(f"{self.where}: {error}") from None
        return f"{self._root.rstrip('/')}/sha256/{digest[:2]}/{digest[2:]}"

    def has(self, digest: str) -> bool:
        """Return True if the store has a file for this digest; only `get` checks its bytes."""
        path = self.path(digest)
        there = self._files.exists(path) or self._files.exists(path + BF16)
        return bool(there) or digest in self._in_windows()

    def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
        """Store `data`; return its digest. `digest`: the digest of `data`, if known already.

        In a folder and in object storage the write is atomic; in a folder it also survives a power
        cut. In other storage a partial object may be left after an error. `get` refuses a partial
        object, and the next `put` writes it again. Raises `RecordError` if the write fails.
        """
        digest = sha256(data) if digest is None else digest
        self._keep(self.path(digest), data)
        return digest

    def put_bf16(self, data: bytes | memoryview, digest: str) -> None:
        """Store an fp32 tensor whose values are all exact in bf16.

        `data`: the values in bf16. `digest`: SHA-256 of the fp32 bytes, which `get` returns. Raises
        `RecordError` like `put`.
        """
        self._keep(self.path(digest) + BF16, data)

    def _keep(self, path: str, data: bytes | memoryview, compared: bool = False) -> None:
        def write() -> None:
            retry(lambda: self._write(path, data, compared), self.where, self._patience)

        try:
            self.room.wait_for(write, self.where)
        except Exception as error:  # every kind of storage has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{self.where}: cannot be written ({reason})") from None

    def put_piece(self, root: str, index: int, data: bytes) -> None:
        """Store the file of a piece. Raises `RecordError` like `put`.

        A file that is there is compared, because a site signs that it holds the piece: a damaged
        one is written anew.

        `root`: root of the tree over all pieces, 64 hex digits. `index`: number of the piece.
        """
        self._keep(f"{self._root.rstrip('/')}/{piece_path(root, index)}", data, compared=True)

    def put_site(self, index: int) -> None:
        """Note that the site with piece `index` writes to this store. Raises like `put`."""
        self._keep(self._site_path(index), b"1\n")

    def has_site(self, index: int) -> bool:
        """Return True if the site with piece `index` has said that it writes to this store."""
        return bool(self._files.exists(self._site_path(index)))

    def _site_path(self, index: int) -> str:
        return f"{self._root.rstrip('/')}/{PIECES}/{SITES}/{index:03d}"

    def drop(self, digest: str) -> None:
        """Remove an object, if it is there; not its copies in windows. Raises `RecordError`."""
        path = self.path(digest)
        try:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)
        except Exception as error:  # every kind of storage has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{self.where}: cannot be removed ({reason})") from None

    def fresh(self) -> Store:
        """Return the same store without what this object remembers of its windows."""
        return Store(self.where, self._patience, self.room)

    def states(self, round_: int) -> Store:
        """Return the store of the start states of a round."""
        return Store(states_of(self.where, round_), self._patience, self.room)

    def drop_states(self, before: int) -> list[int]:
        """Remove the states of all rounds below `before`; return these rounds.

        It is no error if another rank removes the same states at the same time. Raises
        `RecordError` if states cannot be removed.
        """
        place = f"{self._root.rstrip('/')}/{STATES}"
        dropped = []
        try:
            names = self._files.ls(place, detail=False) if self._files.exists(place) else []
            for name in sorted(str(each).rstrip("/").rsplit("/", 1)[-1] for each in names):
                if name.isdigit() and int(name) < before:
                    with contextlib.suppress(FileNotFoundError):
                        self._files.rm(f"{place}/{name}", recursive=True)
                    dropped.append(int(name))
        except Exception as error:  # every kind of storage has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{self.where}: old states cannot be removed ({reason})") from None
        return dropped

    def window(self, rank: str, round_: int) -> Store:
        """Return the store of a rank's window that begins with round `round_`.

        `rank`: `SITE/STAGE.SHARD`. See `dilocox.record.writer.windows`.
        """
        place = f"{self.where.rstrip('/')}/{WINDOWS}/{rank}/{round_:08d}"
        found = Store(place, self._patience, self.room)
        found._index = {}  # a window has no windows below it
        return found

    def windows(self, rank: str) -> dict[int, int]:
        """Return the bytes of each of a rank's windows, by first round. Raises `RecordError`."""
        place = f"{self._root.rstrip('/')}/{WINDOWS}/{rank}"
        try:
            if not self._files.exists(place):
                return {}
            paths = [str(each).rstrip("/") for each in self._files.ls(place, detail=False)]
            names = {path.rsplit("/", 1)[-1]: path for path in paths}
            return {
                int(name): int(self._files.du(path))
                for name, path in names.items()
                if name.isdigit()
            }
        except Exception as error:  # every kind of storage has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{self.where}: cannot be listed ({reason})") from None

    def drop_window(self, rank: str, round_: int) -> None:
        """Remove a rank's window. Raises `RecordError`."""
        place = f"{self._root.rstrip('/')}/{WINDOWS}/{rank}/{round_:08d}"
        try:
            if self._files.exists(place):
                self._files.rm(place, recursive=True)
        except Exception as error:  # every kind of storage has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{self.where}: old rounds cannot be removed ({reason})") from None

    def _in_windows(self) -> dict[str, list[str]]:
        """Return the paths of files in windows by digest, from an index built on first use."""
        if self._index is None:
            place, found = f"{self._root.rstrip('/')}/{WINDOWS}", dict[str, list[str]]()
            # Only the main store has windows; neither windows nor states have windows below them.
            if self._files.exists(place):
                for path in bounded_reads.find(self._files, place, _WINDOW_DEPTH):
                    *_, kind, head, rest = path.rsplit("/", 3)
                    if kind == "sha256" and not rest.startswith("."):
                        found.setdefault(head + rest, []).append(path)
            self._index = found
        return self._index

    def _write(self, path: str, data: bytes | memoryview, compared: bool) -> None:
        whole = self._is_whole(path, len(memoryview(data).cast("B")))
        if whole and (not compared or self._files.cat_file(path) == data):
            return
        folder = path.rsplit("/", 1)[0]
        self._files.makedirs(folder, exist_ok=True)
        # Object storage shows a file only when it is whole. A local file system needs a temporary
        # name for that. On a file system over a network a move may be a copy: there `_is_whole`
        # tells from the size whether a file is whole.
        part = f"{folder}/.{secrets.token_hex(8)}.part" if self._local else path
        try:
            with self._files.open(part, "wb") as file:
                file.write(data)
                if self._local:
                    # Sync before the rename: an existing file is never written again.
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            if part != path:
                # On a full disk the partial file would take the space that the next attempt needs.
                with contextlib.suppress(OSError):
                    self._files.rm_file(part)
            raise
        if part != path:
            self._files.mv(part, path)
            sync_folder(Path(folder))

    def _is_whole(self, path: str, size: int) -> bool:
        """Return True if the file exists with this size; an interrupted write leaves less."""
        try:
            return bool(self._files.info(path).get("size") == size)
        except OSError:
            return False  # the write that follows reports any other problem

    def get(self, digest: str, most: int | None = None) -> bytes:
        """Return the bytes with this digest.

        `most`: limit in bytes; None: half of this machine's memory. If several windows hold a copy,
        the first correct copy is returned. Raises `MissingError` if there is no copy, and
        `RecordError` if every copy has wrong bytes, is larger than `most`, or cannot be read.
        """
        path = self.path(digest)
        most = bounded_reads.memory_limit() if most is None else most
        problems: list[RecordError] = []
        for place in self._places(path, digest):
            try:
                return self._read(place, digest, most)
            except FileNotFoundError:
                continue
            except RecordError as error:
                problems.append(error)
        raise problems[0] if problems else MissingError(f"{path}: not in the store")

    def _places(self, path: str, digest: str) -> Iterator[str]:
        """Iterate over the paths at which the bytes may be, most likely first."""
        yield path
        yield path + BF16
        known = self._in_windows().get(digest, [])
        yield from known
        if known:
            # A run in progress may have removed these windows; newer windows may hold the bytes.
            self._index = None
            yield from (each for each in self._in_windows().get(digest, []) if each not in known)

    def _read(self, path: str, digest: str, most: int) -> bytes:
        """Read and check one copy. Raises `FileNotFoundError` or `RecordError`."""
        unsafe = unsafe_reason(Path(path), Path(self._root)) if self._local else ""
        if unsafe:
            raise RecordError(f"{path}: {unsafe}; a store is plain files")
        try:
            data = bounded_reads.read(self._files, path, most)
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = error.strerror or error
            raise RecordError(f"{path}: cannot be read ({reason})") from None
        if path.endswith(BF16):
            data = widened(data)
        if sha256(data) != digest:
            raise RecordError(f"{path}: holds other bytes than its name says")
        return data


def widened(data: bytes) -> bytes:
    """Convert bf16 values to fp32; both are little-endian bytes."""
    if len(data) % 2:
        return data  # a partial file: the caller's digest check refuses it
    found = bytearray(2 * len(data))
    found[2::4], found[3::4] = data[0::2], data[1::2]
    return bytes(found)


class Besides(Protocol):
    """Gives objects that no store has."""

    def has(self, digest: str) -> bool:
        """Return True if `get` would probably return the object."""

    def get(self, digest: str) -> bytes | None:
        """Return an object; None if it is not known.

        Raises `MissingError` if it is known, but cannot be given.
        """


class Stores:
    """Several stores, read as one: reads take the first store that has the correct bytes."""

    def __init__(self, stores: list[Store], most: int | None = None) -> None:
        """Read from `stores`, in order.

        `most`: limit in bytes of one object, until `allow` raises the limit; None: see `Store.get`.
        """
        self._stores = stores
        self._most = most
        self._sizes: dict[str, int] = {}
        self.besides: Besides | None = None
        """Asked for objects that no store has."""

    def allow(self, state: int) -> None:
        """Raise the limit for a run with a signed state of `state` bytes.

        No other object is more than twice as large: a codec's payload takes at most 8 bytes per
        value, a state 4.
        """
        if self._most is not None:
            most = max(self._most, 2 * state + DOCUMENT_BYTES)
            self._most = min(most, bounded_reads.memory_limit())

    def expect(self, tensors: Iterable[TensorDigest]) -> None:
        """Limit reads of these tensors of signed states to their sizes.

        Other objects get the limit of `allow` for the sum of all tensors.
        """
        for each in tensors:
            self._sizes[each.sha256] = max(each.size, self._sizes.get(each.sha256, 0))
        self.allow(sum(self._sizes.values()))

    def _limit(self, digest: str) -> int | None:
        if self._most is None or digest not in self._sizes:
            return self._most
        # The allowance lets a slightly longer object fail by its digest, with a clear message.
        return min(self._sizes[digest] + DOCUMENT_BYTES, bounded_reads.memory_limit())

    def has(self, digest: str) -> bool:
        """Return True if a store has a file for this digest; only `get` checks its bytes."""
        there = any(store.has(digest) for store in self._stores)
        return there or (self.besides is not None and self.besides.has(digest))

    def get(self, digest: str) -> bytes:
        """Return the bytes with this digest.

        Raises the `RecordError` of the first store with a wrong copy, if any store has a copy;
        `MissingError` otherwise.
        """
        problems, most = [], self._limit(digest)
        for store in self._stores:
            if not store.has(digest):
                continue
            try:
                return store.get(digest, most)
            except MissingError:  # removed since `has` found it
                continue
            except RecordError as error:
                problems.append(error)
        if problems:
            raise problems[0]
        where = ", ".join(store.where for store in self._stores)
        missing = f"{digest[:12]}…: in none of {where}"
        try:
            found = None if self.besides is None else self.besides.get(digest)
        except MissingError as error:
            raise MissingError(f"{missing}; {error}") from None
        if found is None:
            raise MissingError(missing)
        return found


class MissingError(RecordError):
    """No store has the bytes; they may be elsewhere."""
