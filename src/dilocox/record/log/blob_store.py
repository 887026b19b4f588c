"""A content-addressed store: what is in it is found by its SHA-256, and nothing else.

`sha256/ab/cdef…` below a folder or any fsspec URL. What is read is hashed again, so it does not
matter who keeps the store. The states in which rounds begin lie in stores of their own below it,
one per round: an old one can be removed without a look at what else may need its bytes. So do the
payloads of rounds that do not stay for ever (see `dilocox.record.writer.windows`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dilocox.errors import DilocoxError, RecordError
from dilocox.record.log import bounded_reads
from dilocox.record.log.digests import TensorDigest, digest_text, sha256
from dilocox.utils.storage import Room, is_local, opened, retry, sync_folder, unsafe_reason

log = logging.getLogger(__name__)

STATES = "states"
BF16 = ".bf16"
"""Ends the name of an fp32 tensor whose values are all in bf16: what lies there is the upper half
of each value, and the name is the SHA-256 of the fp32 bytes."""
_WINDOW_DEPTH = 6
"""Folders from the windows to a file: site, rank, round, `sha256`, its first digits."""
DOCUMENT_BYTES = 1 << 28
"""Of what is no tensor and no payload: lists of tensors and the like."""
WINDOWS = "windows"
"""Payloads of rounds that are removed one day, with what a replay of them begins from."""


def states_of(where: str, round_: int) -> str:
    """Where the states in which a round begins lie, of the store at `where`."""
    return f"{where.rstrip('/')}/{STATES}/{round_:08d}"


class Removals:
    """Removes what need not stay. A store that cannot remove anything is warned of once: it grows,
    and nothing is lost."""

    def __init__(self, warn: Callable[[str], None], stays: str) -> None:
        self._warn, self._stays = warn, stays
        self._warned = False

    def attempt(self, remove: Callable[[], object]) -> None:
        """Call `remove`, which may raise `RecordError`."""
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

    What fails over a network when something is put there is tried again for `patience` seconds. A
    full disk is waited for (`room`).
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
        """Where it lies on this machine; none if it does not."""
        return Path(self._root).absolute() if self._local else None

    def path(self, digest: str) -> str:
        """Where the bytes with this digest (64 hex digits) lie. Raises `RecordError`."""
        try:
            digest_text(digest)
        except ValueError as error:
            raise RecordError(f"{self.where}: {error}") from None
        return f"{self._root.rstrip('/')}/sha256/{digest[:2]}/{digest[2:]}"

    def has(self, digest: str) -> bool:
        """True if something is there; only `get` says whether it is right."""
        path = self.path(digest)
        there = self._files.exists(path) or self._files.exists(path + BF16)
        return bool(there) or digest in self._in_windows()

    def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
        """Keep `data`; its digest. `digest`: of `data`, if it is known already.

        All or nothing where storage allows: in a folder, which survives a power cut, and in object
        storage. Elsewhere half of it may be there after a break; it is written again then, and
        `get` refuses it until it is whole. Raises `RecordError`.
        """
        digest = sha256(data) if digest is None else digest
        self._keep(self.path(digest), data)
        return digest

    def put_bf16(self, data: bytes | memoryview, digest: str) -> None:
        """Keep the fp32 tensor with this digest, of which `data` are the values in bf16, which lose
        nothing: `get` gives the fp32 bytes. Raises `RecordError` as `put`."""
        self._keep(self.path(digest) + BF16, data)

    def _keep(self, path: str, data: bytes | memoryview) -> None:
        def write() -> None:
            retry(lambda: self._write(path, data), self.where, self._patience)

        try:
            self.room.wait_for(write, self.where)
        except Exception as error:  # every kind of storage has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{self.where}: cannot be written ({reason})") from None

    def states(self, round_: int) -> Store:
        """The store of the states in which a round begins."""
        return Store(states_of(self.where, round_), self._patience, self.room)

    def drop_states(self, before: int) -> list[int]:
        """Remove the states of all rounds below `before`; which rounds. Raises `RecordError`.

        What another rank removes at the same time is no error.
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
        """The store of a rank's window (see `dilocox.record.writer.windows`) that begins with a
        round.

        `rank`: `SITE/STAGE.SHARD`.
        """
        place = f"{self.where.rstrip('/')}/{WINDOWS}/{rank}/{round_:08d}"
        found = Store(place, self._patience, self.room)
        found._index = {}  # a window has none below it
        return found

    def windows(self, rank: str) -> dict[int, int]:
        """Bytes of a rank's windows, by first round. Raises `RecordError`."""
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
        """Paths of the files in windows, by digest; as they were when this was first asked for."""
        if self._index is None:
            place, found = f"{self._root.rstrip('/')}/{WINDOWS}", dict[str, list[str]]()
            # A store has either windows or states above the same place, and windows have none.
            if self._files.exists(place):
                for path in bounded_reads.find(self._files, place, _WINDOW_DEPTH):
                    *_, kind, head, rest = path.rsplit("/", 3)
                    if kind == "sha256" and not rest.startswith("."):
                        found.setdefault(head + rest, []).append(path)
            self._index = found
        return self._index

    def _write(self, path: str, data: bytes | memoryview) -> None:
        if self._is_whole(path, len(memoryview(data).cast("B"))):
            return
        folder = path.rsplit("/", 1)[0]
        self._files.makedirs(folder, exist_ok=True)
        # Object storage shows a file when it is whole; a file system needs a second name. On one
        # that is reached over a network, moving may be a copy: there the size tells.
        part = f"{folder}/.{secrets.token_hex(8)}.part" if self._local else path
        try:
            with self._files.open(part, "wb") as file:
                file.write(data)
                if self._local:
                    # Before its name: what is there already is never written again.
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            if part != path:
                # On a full disk the remains would be in the way of the next try.
                with contextlib.suppress(OSError):
                    self._files.rm_file(part)
            raise
        if part != path:
            self._files.mv(part, path)
            sync_folder(Path(folder))

    def _is_whole(self, path: str, size: int) -> bool:
        """Whether what is to be written there is there: a write may have broken off."""
        try:
            return bool(self._files.info(path).get("size") == size)
        except OSError:
            return False  # whatever else is wrong there, writing says

    def get(self, digest: str, most: int | None = None) -> bytes:
        """The bytes with this digest, `most` at the most (None: half of this machine's memory).

        Several windows may hold them: the first right copy is given. Raises `MissingError` if there
        is no copy, `RecordError` if every copy has another digest, is larger or cannot be read.
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
        """Where the bytes may lie, the likeliest place first."""
        yield path
        yield path + BF16
        known = self._in_windows().get(digest, [])
        yield from known
        if known:
            # A run that goes on may have removed these windows; newer ones may hold the bytes, too.
            self._index = None
            yield from (each for each in self._in_windows().get(digest, []) if each not in known)

    def _read(self, path: str, digest: str, most: int) -> bytes:
        """Raises `FileNotFoundError`, `RecordError`."""
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
    """fp32 bytes, little-endian, of values in bf16."""
    if len(data) % 2:
        return data  # broken off: no digest is that of half a value
    found = bytearray(2 * len(data))
    found[2::4], found[3::4] = data[0::2], data[1::2]
    return bytes(found)


class Stores:
    """Several stores, read as one: the first that holds the right bytes gives them."""

    def __init__(self, stores: list[Store], most: int | None = None) -> None:
        """`most`: bytes of one object, until `allow` says that there may be more (None: see
        `Store.get`)."""
        self._stores = stores
        self._most = most
        self._sizes: dict[str, int] = {}

    def allow(self, state: int) -> None:
        """A state of the run has so many bytes, as it was signed. No object has more than twice as
        many: those of a codec take 8 bytes per value at the most, a state 4."""
        if self._most is not None:
            most = max(self._most, 2 * state + DOCUMENT_BYTES)
            self._most = min(most, bounded_reads.memory_limit())

    def expect(self, tensors: Iterable[TensorDigest]) -> None:
        """Signed states have these tensors: of each no more is read than that, and of any other
        object no more than `allow` says for all of them together."""
        for each in tensors:
            self._sizes[each.sha256] = max(each.size, self._sizes.get(each.sha256, 0))
        self.allow(sum(self._sizes.values()))

    def _limit(self, digest: str) -> int | None:
        if self._most is None or digest not in self._sizes:
            return self._most
        # Of bytes that are a little longer than was signed it is said that they are.
        return min(self._sizes[digest] + DOCUMENT_BYTES, bounded_reads.memory_limit())

    def has(self, digest: str) -> bool:
        """True if something is there in some store; only `get` says whether it is right."""
        return any(store.has(digest) for store in self._stores)

    def get(self, digest: str) -> bytes:
        """As `Store.get`; the error is that of a store which holds something, if one does."""
        problems, most = [], self._limit(digest)
        for store in self._stores:
            if not store.has(digest):
                continue
            try:
                return store.get(digest, most)
            except MissingError:  # removed since it was looked for
                continue
            except RecordError as error:
                problems.append(error)
        if problems:
            raise problems[0]
        where = ", ".join(store.where for store in self._stores)
        raise MissingError(f"{digest[:12]}…: in none of {where}")


class MissingError(RecordError):
    """Bytes that no store holds: they may lie elsewhere."""
