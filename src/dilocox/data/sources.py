"""Where text comes from: the files behind `data.source`, each with its size and sha256.

A source yields its documents in one fixed order, as often as it is asked, and describes itself for
the manifest. Nothing of a source is held in memory but the list of its files.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dilocox.config import DataSection
from dilocox.data.documents import TEXT_FORMATS, read_documents
from dilocox.errors import DataError

STDLIB = "python-stdlib"
BLOCK = 1 << 20

_CODE = """
    asm bash c cc clj cmake cpp cs css cu cuh cxx erl ex exs f90 fs go h hh hpp hs html
    java jl js jsx kt lisp lua m mjs ml mm php pl proto py pyi pyx r rb rs s scala sh
    sol sql swift toml ts tsx vue yaml yml zig
"""

SUFFIXES: dict[str, frozenset[str]] = {
    "jsonl": frozenset({".jsonl", ".ndjson", ".jsonl.gz"}),
    "parquet": frozenset({".parquet"}),
    "text": frozenset({".txt", ".text", ".md", ".rst", ".tex"}),
    "code": frozenset(f".{name}" for name in _CODE.split()),
}

Progress = Callable[[str, float], None]


class Source(Protocol):
    """Text with an identity."""

    @property
    def size(self) -> int | None:
        """Bytes on disk, or None where that is not known before reading."""

    def placed(self) -> Iterator[tuple[int, str]]:
        """Yield every document behind the number of its file (of `describe`), in the same order
        at every call. Raises `DataError`."""

    def describe(self) -> dict[str, Any]:
        """The manifest's entry: kind, licence, revision, files with sizes and digests."""


@dataclass(frozen=True)
class SourceFile:
    """One local file. `name` is relative to its source, so that it is the same on any machine."""

    path: Path
    name: str
    format: str
    size: int
    modified: int
    """Nanoseconds; a file that changes while it is read is refused."""
    sha256: str = ""


@dataclass(frozen=True)
class FileSource:
    """Local files: one file, a folder, or the Python standard library."""

    kind: str
    files: tuple[SourceFile, ...]
    skipped: int
    """Files of the folder that are not UTF-8 text."""
    text_field: str
    licence: str | None
    revision: str | None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def documents(self) -> Iterator[str]:
        """Every document."""
        return (text for _, text in self.placed())

    def placed(self) -> Iterator[tuple[int, str]]:
        for number, file in enumerate(self.files):
            for text in read_documents(file.path, file.format, self.text_field):
                yield number, text
            now = _stat(file.path)
            if (now.st_size, now.st_mtime_ns) != (file.size, file.modified):
                raise DataError(f"{file.path}: changed while it was read; prepare the data again")

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "licence": self.licence,
            "revision": self.revision,
            "skipped_files": self.skipped,
            "files": [
                {"name": file.name, "bytes": file.size, "sha256": file.sha256}
                for file in self.files
            ],
        }


def list_files(source: str, data: DataSection) -> list[SourceFile]:
    """The files of a local `source` in their fixed order, not read yet (no digests).

    Raises `DataError` where there is nothing to read.
    """
    if source == STDLIB:
        return _stdlib_files()
    path = Path(source).expanduser()
    if path.is_file():
        named = _format_of(path.name) if data.format == "auto" else data.format
        return [_source_file(path, path.name, named or "text")]
    if not path.is_dir():
        raise DataError(
            f"data.source {source}: no such file or folder; "
            'for a hub dataset set data.format = "hub"'
        )
    wanted = SUFFIXES if data.format == "auto" else {data.format: SUFFIXES[data.format]}
    files = [
        _source_file(file, name, found)
        for name, file in _walk(path)
        if (found := _format_of(file.name)) in wanted and found is not None
    ]
    if not files:
        known = " ".join(sorted(suffix for group in wanted.values() for suffix in group))
        raise DataError(f"data.source {source}: no file with text in this folder; taken: {known}")
    return files


def read_source(source: str, data: DataSection, progress: Progress) -> FileSource:
    """List and digest the files of a local `source`.

    Files of a folder that are not UTF-8 are left out and counted; a file that was named itself must
    be readable. Raises `DataError`.
    """
    found = list_files(source, data)
    total = sum(file.size for file in found) or 1
    files: list[SourceFile] = []
    done = 0
    for file in found:
        digest, is_text = _digest(file.path, decode=file.format in TEXT_FORMATS)
        done += file.size
        progress("reading sources", done / total)
        if is_text:
            files.append(
                SourceFile(file.path, file.name, file.format, file.size, file.modified, digest)
            )
        elif Path(source).expanduser().is_file():
            raise DataError(f"data.source {source}: not UTF-8 text; convert it, or set data.format")
    stdlib = source == STDLIB
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return FileSource(
        kind=STDLIB if stdlib else "files",
        files=tuple(files),
        skipped=len(found) - len(files),
        text_field=data.text_field,
        licence=data.licence or ("PSF-2.0" if stdlib else None),
        revision=version if stdlib else data.revision,
    )


def _stdlib_files() -> list[SourceFile]:
    """The `.py` files of the modules that Python itself lists as its standard library.

    That list leaves out installed packages, the tests and what a build or a distribution adds, so
    the same Python version has the same corpus everywhere. 12 MB with CPython 3.11.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for name, path in _walk(root):
        parts = Path(name).parts
        module = parts[0].removesuffix(".py") if len(parts) == 1 else parts[0]
        tests = any(part in ("test", "tests", "idle_test") for part in parts[:-1])
        if path.suffix == ".py" and module in sys.stdlib_module_names and not tests:
            files.append(_source_file(path, name, "code"))
    if not files:
        raise DataError(
            f"data.source {STDLIB}: this Python has no source files at {root}; "
            "name files or a folder instead"
        )
    return files


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """(relative POSIX name, path) of every file below `root`, sorted; without hidden ones."""
    found: list[tuple[str, Path]] = []
    for folder, inner, names in os.walk(root, onerror=_unreadable):
        inner[:] = [
            name
            for name in inner
            if not name.startswith(".") and name not in ("__pycache__", "site-packages")
        ]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found.append((path.relative_to(root).as_posix(), path))
    found.sort()
    yield from found


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})")


def _format_of(name: str) -> str | None:
    lower = name.lower()
    for kind, suffixes in SUFFIXES.items():
        if any(lower.endswith(suffix) for suffix in suffixes):
            return kind
    return None


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _source_file(path: Path, name: str, kind: str) -> SourceFile:
    status = _stat(path)
    return SourceFile(path, name, kind, status.st_size, status.st_mtime_ns)


def _digest(path: Path, *, decode: bool) -> tuple[str, bool]:
    """sha256 of a file as hex and, with `decode`, whether it is UTF-8 text without NUL."""
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_text = True
    try:
        with path.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                if decode and is_text:
                    try:
                        is_text = "\0" not in decoder.decode(block)
                    except UnicodeDecodeError:
                        is_text = False
        if decode and is_text:
            try:
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                is_text = False
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest(), is_text
