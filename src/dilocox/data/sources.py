"""Sources of text: the local files behind `data.source`, with their sizes and SHA-256 digests.

A source yields its documents in the same order on every pass, and describes itself for the
manifest. It keeps only the list of its files in memory.
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

from dilocox.config.data import DataSection
from dilocox.config.data_sources import TEXT_FORMATS
from dilocox.data.conversations import Layout, read_conversations
from dilocox.data.list_files import counted, walk
from dilocox.data.packed_files import UNPACKED, is_packed, open_binary
from dilocox.data.readers import read_documents
from dilocox.data.record_filter import RecordFilter
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
"""Endings of JSON files. Such a file is read if it is named itself or if `data.format` is "jsonl",
"chat", "instruction" or "preference". Otherwise it is left out of a folder, since it may hold
anything."""

CSV = _also_packed(".csv", ".tsv")
"""Endings of CSV files. Such a file is read if it is named itself or if `data.format` is "csv",
"chat", "instruction" or "preference". Otherwise it is left out of a folder."""

ALL_SUFFIXES = {**SUFFIXES, "jsonl": SUFFIXES["jsonl"] | JSON, "csv": CSV}
"""Endings by format, with those that a folder of format "auto" leaves out."""

RECORDS = ("jsonl", "csv", "parquet")
"""Formats of files that hold conversations."""

PACKED = (".bz2", ".xz", ".lz4", ".zip", ".7z", ".br")
"""Endings of compressed files that cannot be read here."""

TABLES = (".xls", ".xlsx", ".arrow", ".feather")
"""Endings of tables and data sets that are not read as records."""

KINDS_LEFT_OUT = 12
"""Number of file endings that are counted separately among the files that are left out; the most
frequent ones are chosen."""

Progress = Callable[[str, float], None]


class Source(Protocol):
    """A source of documents that can be read several times, with the same documents each time."""

    @property
    def size(self) -> int | None:
        """Bytes on disk; None if not known before reading."""

    def placed(self) -> Iterator[tuple[int, str]]:
        """Yield (file number, text) of every document, in the same order at every call.

        The file number is an index in the `files` of `describe`. Raises `DataError` if a file
        cannot be read.
        """

    @property
    def left_out(self) -> Mapping[str, int]:
        """Number of files that are left out, by reason, without those that `describe` counts."""

    @property
    def without_text(self) -> int:
        """Number of records that the last pass left out because their text is null or missing."""

    @property
    def filter(self) -> RecordFilter | None:
        """Decides which records are taken; None: all records."""

    def describe(self) -> dict[str, Any]:
        """Returns the manifest's entry: kind, licence, revision, files with sizes and digests."""


@dataclass(frozen=True)
class SourceFile:
    """One local file of a source."""

    path: Path
    name: str
    """Name relative to the source, so that it is the same on every machine."""
    format: str
    size: int
    """Size in bytes."""
    modified: int
    """Time of the last change in nanoseconds. A file that changes while it is read is refused."""
    sha256: str = ""
    """SHA-256 (hex); empty if not computed yet."""


@dataclass(frozen=True)
class FileSource:
    """Local files: one file, a folder, or the Python standard library."""

    kind: str
    files: tuple[SourceFile, ...]
    skipped: int
    """Number of files of the folder that are left out because they are not UTF-8 text."""
    text_field: str
    licence: str | None
    revision: str | None
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of files and folders that are left out for another reason, by reason."""
    layout: Layout | None = None
    """Fields of conversations; None: the documents are text."""
    filter: RecordFilter | None = None
    columns: tuple[str, ...] = ()
    """Fields of text records that hold the number of each column."""
    _without_text: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def documents(self) -> Iterator[str]:
        """Yield the text of every document."""
        return (text for _, text in self.placed())

    @property
    def without_text(self) -> int:
        return self._without_text["records"]

    def _count(self) -> None:
        self._without_text["records"] += 1

    def _read(self, file: SourceFile) -> Iterator[str]:
        if self.layout is not None:
            return read_conversations(file.path, file.format, self.layout, self._count, self.filter)
        about = (self.text_field, self._count, self.filter, self.columns)
        return read_documents(file.path, file.format, *about)

    def placed(self) -> Iterator[tuple[int, str]]:
        self._without_text.clear()
        if self.filter is not None:
            self.filter.begin()
        for number, file in enumerate(self.files):
            for text in self._read(file):
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
            **({} if self.filter is None else {"filter": self.filter.wanted}),
        }


def list_files(source: str, data: DataSection) -> list[SourceFile]:
    """Returns the files of a local `source` in their fixed order, without digests.

    Raises `DataError` if there is no file to read.
    """
    return find_files(source, data)[0]


def find_files(source: str, data: DataSection) -> tuple[list[SourceFile], Mapping[str, int]]:
    """Returns the files of a local `source`, and the number of files left out by reason.

    See `list_files`.
    """
    if source == STDLIB:
        return _stdlib_files(), {}
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() in PACKED:
            raise DataError(
                f"data.source {source}: {path.suffix} files cannot be decompressed here; "
                "decompress the file, or compress it as .gz"
            )
        as_records = data.has_conversations or data.format in RECORDS
        if as_records and path.suffix.lower() in TABLES:
            raise DataError(
                f"data.source {source}: {path.suffix} files are not read; convert the file to "
                "JSON lines or Parquet"
            )
        named = _format_of(path.name, ALL_SUFFIXES) if _by_name(data) else data.format
        if data.has_conversations and named not in RECORDS:
            named = "jsonl"
        return [_source_file(path, path.name, named or "text")], {}
    if not path.is_dir():
        raise DataError(
            f"data.source {source}: no such file or folder; "
            'for a hub dataset set data.format = "hub"'
        )
    wanted = _endings(data)
    listed, left = walk(path, links=True)
    names = {file.suffix if file.suffix == ".arrow" else file.name for _, file in listed}
    as_records = data.has_conversations or data.format == "jsonl"
    if as_records and {".arrow", "dataset_info.json"} <= names:
        raise DataError(
            f"data.source {source}: is a folder of save_to_disk of datasets, which is not read; "
            "write the records with to_parquet or to_json"
        )
    files, endings = [], Counter[str]()
    for name, file in listed:
        found = _format_of(file.name, wanted)
        if found is not None:
            files.append(_source_file(file, name, found))
        else:
            endings[_ending(file.name)] += 1
    if data.has_conversations and {each.format for each in files} > {"csv"}:
        # Tables beside conversations are seldom conversations, or hold the same ones.
        endings.update(_ending(each.name) for each in files if each.format == "csv")
        files = [each for each in files if each.format != "csv"]
    left += _summed_up(endings)
    if not files:
        known = " ".join(sorted(suffix for group in wanted.values() for suffix in group))
        others = f" (left out: {counted(left)})" if left else ""
        raise DataError(
            f"data.source {source}: no file with text in this folder{others}; "
            f"endings that are read: {known}"
        )
    return files, left


def _endings(data: DataSection) -> Mapping[str, frozenset[str]]:
    """Returns the endings of the files of a folder that are read, by format."""
    if data.format == "auto":
        return SUFFIXES
    kinds = RECORDS if data.has_conversations else (data.format,)
    return {kind: ALL_SUFFIXES[kind] for kind in kinds}


def _by_name(data: DataSection) -> bool:
    """Returns whether the names of files decide on their formats."""
    return data.format == "auto" or data.has_conversations


def _ending(name: str) -> str:
    """Returns the reason under which a file that is left out is counted."""
    path = Path(name.lower())
    for kind, endings in (("jsonl", JSON), ("csv", CSV)):
        if _is_one_of(name, endings):
            return f'{_last(path)} (data.format = "{kind}" reads them)'
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
    """List the files of a local `source` and compute their digests.

    Files of a folder that are not UTF-8 text are left out and counted. Raises `DataError` if no
    file can be read, or if `source` is itself a file and not UTF-8 text.
    """
    found, left = find_files(source, data)
    text = next((each.name for each in found if each.format in TEXT_FORMATS), None)
    if data.filter and text is not None:
        raise DataError(
            f"data.source {source}: a filter needs records with fields, and {text} is text; leave "
            "the filter out, or name JSONL, CSV or Parquet files alone"
        )
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
            "(for example with iconv -f LATIN1 -t UTF-8)"
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
        layout=Layout.of(data),
        filter=RecordFilter(data.filter) if data.filter else None,
        columns=tuple(data.columns),
    )


def _stdlib_files() -> list[SourceFile]:
    """Returns the `.py` files of the modules in `sys.stdlib_module_names`, without tests.

    Installed packages and the additions of a build or a distribution are left out. So the same
    Python version has the same corpus on every machine: 12 MB with CPython 3.11.
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


def _format_of(name: str, endings: Mapping[str, frozenset[str]]) -> str | None:
    """Returns the format of a file by its ending, or None if it is none of `endings`."""
    return next((kind for kind, known in endings.items() if _is_one_of(name, known)), None)


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
    """Returns the SHA-256 (hex) of a file, and whether it is UTF-8 text without NUL.

    Without `decode`, the second value is True and the text is not checked.
    """
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
    """Checks block by block whether bytes are UTF-8 text without NUL."""

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
