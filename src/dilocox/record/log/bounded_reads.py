"""Reads from a stranger's storage, with limits on bytes and on names.

A malicious web server may send data without end, and may list files without end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin

from dilocox.errors import RecordError

CHUNK = 1 << 22
PAGE_BYTES = 1 << 24
"""Limit in bytes of a web server's page that lists a folder."""
NAMES = 1_000_000
"""Maximum number of names that `find` reads from a web server."""
_LINK = re.compile(r"""<a\s[^>]*?href\s*=\s*["']([^"'>]+)["']""", re.IGNORECASE)


def memory_limit() -> int:
    """Return the limit in bytes of any object, whatever a record asks for: half of the memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def read(files: Any, path: str, most: int) -> bytes:
    """Return the bytes of file `path` of the fsspec file system `files`.

    Raises `RecordError` if the file has more than `most` bytes; no more bytes than that are kept.
    Raises `OSError` if the storage does.
    """
    if _is_web(files):
        return b"".join(_chunks(files, path, most))
    # Other storage knows the size of a file and does not send more.
    if (files.info(path).get("size") or 0) > most:
        raise _larger(path, most)
    found: bytes = files.cat_file(path)
    return found


def copy(files: Any, path: str, target: Path, most: int) -> int:
    """Copy a file of `files` to `target`; return its number of bytes. Raises like `read`."""
    size = 0
    with target.open("wb") as file:
        for chunk in _chunks(files, path, most):
            file.write(chunk)
            size += len(chunk)
    return size


def names(files: Any, place: str) -> list[tuple[str, bool]]:
    """List the folder `place` as (name, is a folder). Raises like `read`."""
    if not _is_web(files):
        found = []
        for each in files.ls(place, detail=True):
            where, _, name = str(each["name"]).rstrip("/").rpartition("/")
            # Object storage may list the folder itself, which is left out. An entry that is not a
            # plain file counts as a folder, so that nobody reads it.
            if each["type"] == "file" or where == place.rstrip("/"):
                found.append((name, each["type"] != "file"))
        return found
    base = place.rstrip("/") + "/"
    page = read(files, base, PAGE_BYTES).decode("utf-8", "replace")
    listed: dict[str, bool] = {}
    for link in _LINK.findall(page):
        where = urljoin(base, unescape(link)).partition("#")[0].partition("?")[0]
        name = unquote(where.removeprefix(base)) if where.startswith(base) else ""
        if name.rstrip("/") and "/" not in name.rstrip("/"):
            listed[name.rstrip("/")] = name.endswith("/")
    return sorted(listed.items())


def find(files: Any, place: str, depth: int) -> Iterator[str]:
    """Iterate over the paths of files below the folder `place`.

    On a web server the search goes at most `depth` folders down, and raises `RecordError` after
    `NAMES` names. Other storage lists all files. Raises like `read`.
    """
    if not _is_web(files):
        yield from map(str, files.find(place))
        return
    left, seen = [(place.rstrip("/"), depth)], 0
    while left:
        folder, more = left.pop()
        for name, is_folder in names(files, folder):
            seen += 1
            if seen > NAMES:
                raise RecordError(f"{place}: names more than {NAMES:,} files and folders")
            if not is_folder:
                yield f"{folder}/{name}"
            elif more > 1:
                left.append((f"{folder}/{name}", more - 1))


def _chunks(files: Any, path: str, most: int) -> Iterator[bytes]:
    # With block size 0 an HTTP answer is read as a stream. With blocks, fsspec reads each answer
    # whole, and a server may answer a request for one block with any number of bytes.
    options = {"block_size": 0} if _is_web(files) else {}
    size = 0
    with files.open(path, "rb", **options) as file:
        while chunk := file.read(min(CHUNK, most + 1 - size)):
            size += len(chunk)
            if size > most:
                raise _larger(path, most)
            yield chunk


class TooLargeError(RecordError):
    """A file has more bytes than the reader allows."""


def _larger(path: str, most: int) -> TooLargeError:
    return TooLargeError(f"{path}: larger than the {most:,} bytes that are allowed")


def _is_web(files: Any) -> bool:
    found = files.protocol
    return bool({"http", "https"} & set((found,) if isinstance(found, str) else found))
