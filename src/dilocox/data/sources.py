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
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dilocox.config.run_config import DataSection
from dilocox.data.list_files import counted, walk
from dilocox.data.readers import TEXT_FORMATS, UNPACKED, is_packed, open_binary, read_documents
from dilocox.errors import DataError

STDLIB = "python-stdlib"
BLOCK = 1 << 20

_CODE = """
    asm bash c cc clj cmake cpp cs css cu cuh cxx erl ex exs f90 fs go h hh hpp hs html
    java jl js jsx kt lisp lua m mjs ml mm php pl proto py pyi pyx r rb rs s scala sh
    sol sql swift toml ts tsx vue yaml yml zig
"""


def _also_packed(*suffixes: str) -> frozenset[str]:
    packed = (f"{suffix}{packing}" for suffix in suffixes for packing in UNPACKED)
    return frozenset({*suffixes, *packed})


SUFFIXES: dict[str, frozenset[str]] = {
    "jsonl": _also_packed(".jsonl", ".ndjson"),
    "parquet": frozenset({".parquet"}),
    "text": _also_packed(".txt", ".text", ".md", ".rst", ".tex"),
    "code": frozenset(f".{name}" for name in _CODE.split()),
}

JSON = _also_packed(".json")
"""Records where such a file is named, or `data.format` says so; in a folder it may be anything."""

PACKED = (".bz2", ".xz", ".lz4", ".zip", ".7z", ".br")
"""Compressed in a way that is not read here."""

KINDS_LEFT_OUT = 12
"""Endings of files that are left out are told apart, the most frequent ones."""

Progress = Callable[[str, float], None]


class Source(Protocol):
    """Text with an identity."""

    @property
    def size(self) -> int | None:
        """Bytes on disk, or None where that is not known before reading."""

    def placed(self) -> Iterator[tuple[int, str]]:
        """Yield every document behind the number of its file (of `describe`), in the same order
        at every call. Raises `DataError`."""

    @property
    def left_out(self) -> Mapping[str, int]:
        """Reason -> files that are not taken, but for those that `describe` counts."""

    @property
    def without_text(self) -> int:
        """Records that the last pass left out, since their text is null or missing."""

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
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Reason -> files and folders of the folder that are not taken for another reason."""
    _without_text: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def documents(self) -> Iterator[str]:
        """Every document."""
        return (text for _, text in self.placed())

    @property
    def without_text(self) -> int:
        return self._without_text["records"]

    def _count(self) -> None:
        self._without_text["records"] += 1

    def placed(self) -> Iterator[tuple[int, str]]:
        self._without_text.clear()
        for number, file in enumerate(self.files):
            for text in read_documents(file.path, file.format, self.text_field, self._count):
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
    return find_files(source, data)[0]


def find_files(source: str, data: DataSection) -> tuple[list[SourceFile], Mapping[str, int]]:
    """The same, and reason -> files that are not taken."""
    if source == STDLIB:
        return _stdlib_files(), {}
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() in PACKED:
            raise DataError(
                f"data.source {source}: {path.suffix} is not unpacked; unpack it, or pack it as .gz"
            )
        named = _format_of(path.name, JSON) if data.format == "auto" else data.format
        return [_source_file(path, path.name, named or "text")], {}
    if not path.is_dir():
        raise DataError(
            f"data.source {source}: no such file or folder; "
            'for a hub dataset set data.format = "hub"'
        )
    wanted = SUFFIXES if data.format == "auto" else {data.format: SUFFIXES[data.format]}
    records = JSON if data.format == "jsonl" else frozenset[str]()
    listed, left = walk(path, links=True)
    files, endings = [], Counter[str]()
    for name, file in listed:
        found = _format_of(file.name, records)
        if found in wanted and found is not None:
            files.append(_source_file(file, name, found))
        else:
            endings[_ending(file.name)] += 1
    left += _summed_up(endings)
    if not files:
        known = " ".join(sorted(suffix for group in wanted.values() for suffix in group))
        others = f" (left out: {counted(left)})" if left else ""
        raise DataError(
            f"data.source {source}: no file with text in this folder{others}; taken: {known}"
        )
    return files, left


def _ending(name: str) -> str:
    """What a file that is not taken is counted as."""
    path = Path(name.lower())
    if _is_one_of(name, JSON):
        return f'{_last(path)} (data.format = "jsonl" reads them)'
    return _last(path) or "without an ending"


def _last(path: Path) -> str:
    packed = path.suffix in (*PACKED, *UNPACKED)
    return "".join(path.suffixes[-2:]) if packed else path.suffix


def _summed_up(endings: Counter[str]) -> Counter[str]:
    frequent = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
    kept = Counter(dict(frequent[:KINDS_LEFT_OUT]))
    rest = sum(count for _, count in frequent[KINDS_LEFT_OUT:])
    return kept + Counter({"with other endings": rest})


def read_source(source: str, data: DataSection, progress: Progress) -> FileSource:
    """List and digest the files of a local `source`.

    Files of a folder that are not UTF-8 are left out and counted; a file that was named itself must
    be readable. Raises `DataError`.
    """
    found, left = find_files(source, data)
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
    if not files:
        raise DataError(
            f"data.source {source}: none of its {len(found)} files is UTF-8 text; convert them "
            "(such as iconv -f LATIN1 -t UTF-8)"
        )
    stdlib = source == STDLIB
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return FileSource(
        kind=STDLIB if stdlib else "files",
        files=tuple(files),
        skipped=len(found) - len(files),
        text_field=data.text_field,
        licence=data.licence or ("PSF-2.0" if stdlib else None),
        revision=version if stdlib else data.revision,
        left_out=left,
    )


def _stdlib_files() -> list[SourceFile]:
    """The `.py` files of the modules that Python itself lists as its standard library.

    That list leaves out installed packages, the tests and what a build or a distribution adds, so
    the same Python version has the same corpus everywhere. 12 MB with CPython 3.11.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for name, path in walk(root, links=False)[0]:
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


def _format_of(name: str, records: frozenset[str]) -> str | None:
    """By its ending; `records`: further endings of files of records."""
    for kind, suffixes in SUFFIXES.items():
        if _is_one_of(name, suffixes):
            return kind
    return "jsonl" if _is_one_of(name, records) else None


def _is_one_of(name: str, suffixes: frozenset[str]) -> bool:
    return name.lower().endswith(tuple(suffixes))


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _source_file(path: Path, name: str, kind: str) -> SourceFile:
    status = _stat(path)
    return SourceFile(path, name, kind, status.st_size, status.st_mtime_ns)


def _digest(path: Path, *, decode: bool) -> tuple[str, bool]:
    """sha256 of a file as hex and, with `decode`, whether it holds UTF-8 text without NUL."""
    digest = hashlib.sha256()
    text = _TextCheck()
    packed = is_packed(path)
    try:
        with path.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                if decode and not packed:
                    text.add(block)
        if decode and packed:
            with open_binary(path) as unpacked:
                while text.good and (block := unpacked.read(BLOCK)):
                    text.add(block)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason})") from None
    return digest.hexdigest(), not decode or text.ended()


class _TextCheck:
    """Are these bytes UTF-8 without NUL?"""

    def __init__(self) -> None:
        self.good = True
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def add(self, block: bytes, *, final: bool = False) -> None:
        if self.good:
            try:
                self.good = "\0" not in self._decoder.decode(block, final)
            except UnicodeDecodeError:
                self.good = False

    def ended(self) -> bool:
        self.add(b"", final=True)
        return self.good
