"""Documents of one file: text, code, JSONL or Parquet, one after another, never the whole file."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from dilocox.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

UNPACKED = (".gz", ".zst")
"""Endings of packed files that are unpacked while they are read."""

TEXT_FORMATS = ("text", "code")
"""Formats whose files are plain UTF-8 text."""

CUT = {"text": 32 * 1024, "code": 512 * 1024}
"""Characters after which a file of more than twice as many is cut into documents."""

BLOCK = 1 << 20

FIELD = "set data.text_field to the name of one that holds text"
"""The mend for records whose text is not found."""


def read_documents(
    path: Path, kind: str, text_field: str, without_text: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """Yield the documents of `path` in file order; blank ones are left out.

    `without_text` is called for every record whose text is null or missing; it is left out, too.

    A text or code file is one document; a long one is cut where `cut_point` says, so that a single
    big file can be held out in part and never has to fit in memory. A JSONL line, an object of a
    JSON array and a Parquet row are a document each. Text and records may be packed (`UNPACKED`).
    Raises `DataError` that names the file and, for records, the line or number.
    """
    documents: Iterator[str | None]
    if kind == "jsonl":
        documents = _records(path, text_field)
    elif kind == "parquet":
        documents = _parquet(path, text_field)
    else:
        documents = _text(path, CUT[kind])
    for document in documents:
        if document is None:
            without_text()
        elif document and not document.isspace():
            yield clean(document)


def is_packed(path: Path) -> bool:
    """Is it one of `UNPACKED`?"""
    return path.suffix.lower() in UNPACKED


def open_binary(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if it is packed. Reading may raise `OSError`, `EOFError` and
    `zlib.error`."""
    if not is_packed(path):
        return path.open("rb")
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return io.BufferedReader(_Zstd(path), BLOCK)


def clean(text: str) -> str:
    """`text` with lone surrogates, which have no UTF-8 form, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cut_point(text: str, start: int, after: int) -> int | None:
    """Where the document that begins at `start` ends, or None if `text` holds too little to tell.

    It ends behind the first blank line that follows `after` characters; without one within twice as
    many, behind a line end; else at twice as many.
    """
    limit = start + 2 * after
    if len(text) <= limit:
        return None
    for end in ("\n\n", "\n"):
        found = text.find(end, start + after, limit)
        if found >= 0:
            return found + len(end)
    return limit


def _text(path: Path, after: int) -> Iterator[str]:
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8", newline="") as stream:
            pending = stream.read(BLOCK).removeprefix("\ufeff")
            while pending:
                start = 0
                while (end := cut_point(pending, start, after)) is not None:
                    yield pending[start:end]
                    start = end
                pending = pending[start:]
                block = stream.read(BLOCK)
                if not block:
                    yield pending
                    return
                pending += block
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def _records(path: Path, field: str) -> Iterator[str | None]:
    """JSON objects: one per line, or all of one array."""
    return _texts(_array(path) if _is_array(path) else _jsonl(path), field)


def _is_array(path: Path) -> bool:
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", errors="replace") as stream:
            while block := stream.read(BLOCK):
                if not block.isspace():
                    return block.lstrip().startswith("[")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    return False


def _array(path: Path) -> Iterator[tuple[str, object]]:
    number = 0
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig") as stream:
            for number, record in enumerate(_objects(stream), start=1):
                yield f"{path}:record {number}", record
    except (ValueError, RecursionError) as error:  # of which UnicodeDecodeError is one
        raise DataError(
            f"{path}:record {number + 1}: not valid JSON ({error}); mend or remove it"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after record {number} ({error})") from None


def _objects(stream: IO[str]) -> Iterator[object]:
    """The elements of a JSON array, one after another; raises `ValueError` where it is broken."""
    decoder = json.JSONDecoder()
    text, due = "", "["
    while True:
        text = text.lstrip()
        problem: ValueError = ValueError("the array does not end")
        if text and due == "[":
            text, due = text[1:], "] or value"
            continue
        if text.startswith("]") and due != "value":
            break
        if text and due == "] or comma":
            if text[0] != ",":
                raise ValueError(f"no comma before {text[:16]!r}")
            text, due = text[1:], "value"
            continue
        if text:
            try:
                value, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                # Cut off by the end of what was read, or wrong for good?
                near = error.pos > len(text) - 16 or error.msg.startswith("Unterminated string")
                if not near:
                    raise
                problem = error
            else:
                yield value
                text, due = text[end:], "] or comma"
                continue
        block = stream.read(BLOCK)
        if not block:
            raise problem
        text += block
    text = text[1:]
    while not text.strip() and (text := stream.read(BLOCK)):
        pass
    if text.strip():
        raise ValueError(f"{text.strip()[:16]!r} behind the array")


def _jsonl(path: Path) -> Iterator[tuple[str, object]]:
    number = 0
    try:
        with open_binary(path) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                yield f"{path}:{number}", _parsed(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number} ({error})") from None


def _parsed(line: bytes, where: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); mend or remove the line") from None


def _texts(records: Iterator[tuple[str, object]], field: str) -> Iterator[str | None]:
    """The text of every record; None for a record whose text is null or missing.

    `records`: (place for messages, record). Raises `DataError` for a record that is no object, for
    a text of another type, and where no record has the field.
    """
    missing, found = None, False
    for where, record in records:
        if not isinstance(record, dict):
            raise DataError(
                f'{where}: not a JSON object; each record must be one with a "{field}" field'
            )
        if field not in record:
            names = ", ".join(sorted(record)[:8]) or "none"
            missing = missing or f'{where}: no field "{field}" (fields: {names})'
            yield None
            continue
        found, text = True, record[field]
        if text is not None and not isinstance(text, str):
            chat = "; chats are not read, write each as one text" if isinstance(text, list) else ""
            kind = _kind_of(text)
            raise DataError(f'{where}: field "{field}" is not text but {kind}; {FIELD}{chat}')
        yield text
    if missing is not None and not found:
        raise DataError(f"{missing}; {FIELD}")


def _kind_of(value: object) -> str:
    """What a value is that is not text, for messages."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"


def _parquet(path: Path, field: str) -> Iterator[str | None]:
    # Imported here: reading token files must not need Arrow's start-up time.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            schema = table.schema_arrow
            columns = schema.get_all_field_indices(field)
            if not columns:
                names = ", ".join(schema.names[:8]) or "none"
                raise DataError(f'{path}: no column "{field}" (columns: {names}); {FIELD}')
            if len(columns) > 1:
                raise DataError(
                    f'{path}: {len(columns)} columns are named "{field}"; rename all but one'
                )
            kind = schema.field(columns[0]).type
            if not _holds_text(kind):
                raise DataError(f'{path}: column "{field}" holds {kind}, not text; {FIELD}')
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _decoded(value, f'{path}: column "{field}", row {row}')
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable Parquet file ({reason})") from None


def _holds_text(kind: pa.DataType) -> bool:
    """Text, UTF-8 bytes without the annotation, a dictionary of them, or nothing but nulls."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
        pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_null,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def _decoded(value: str | bytes | None, where: str) -> str | None:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason}); convert or remove it") from None


class _Zstd(io.RawIOBase):
    """Reads a file packed by zstd. Raises `OSError`, with a mend where the window is too long."""

    def __init__(self, path: Path) -> None:
        # Imported here: reading token files must not need Arrow's start-up time.
        import pyarrow as pa

        self._path = path
        self._stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")

    def readable(self) -> bool:
        """It is read only."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Unpacked bytes into `buffer`; how many."""
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            # Arrow lets nobody raise the limit of 128 MiB.
            if "too much memory" not in str(error):
                raise
            raise OSError(
                "packed by zstd --long, with a longer window than can be read here; unpack it: "
                f"zstd -d --long=31 {shlex.quote(self._path.name)}"
            ) from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """The file, too."""
        if not self.closed:
            self._stream.close()
        super().close()
