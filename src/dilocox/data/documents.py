"""Documents of one file: text, code, JSONL or Parquet, one after another, never the whole file."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from dilocox.errors import DataError

UNPACKED = (".gz", ".zst")
"""Endings of packed files that are unpacked while they are read."""

TEXT_FORMATS = ("text", "code")
"""Formats whose files are plain UTF-8 text."""

CUT = {"text": 32 * 1024, "code": 512 * 1024}
"""Characters after which a file of more than twice as many is cut into documents."""

BLOCK = 1 << 20


def read_documents(path: Path, kind: str, text_field: str) -> Iterator[str]:
    """Yield the documents of `path` in file order; blank ones are left out.

    A text or code file is one document; a long one is cut where `cut_point` says, so that a single
    big file can be held out in part and never has to fit in memory. A JSONL line, an object of a
    JSON array and a Parquet row are a document each. Text and records may be packed (`UNPACKED`).
    Raises `DataError` that names the file and, for records, the line or number.
    """
    if kind == "jsonl":
        documents = _records(path, text_field)
    elif kind == "parquet":
        documents = _parquet(path, text_field)
    else:
        documents = _text(path, CUT[kind])
    for document in documents:
        if document and not document.isspace():
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
    # Imported here: reading token files must not need Arrow's start-up time.
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), BLOCK)


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


def _records(path: Path, field: str) -> Iterator[str]:
    """JSON objects: one per line, or all of one array."""
    return _array(path, field) if _is_array(path) else _jsonl(path, field)


def _is_array(path: Path) -> bool:
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", errors="replace") as stream:
            while block := stream.read(BLOCK):
                if not block.isspace():
                    return block.lstrip().startswith("[")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    return False


def _array(path: Path, field: str) -> Iterator[str]:
    number = 0
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig") as stream:
            for number, record in enumerate(_objects(stream), start=1):
                yield _record_text(record, field, f"{path}:record {number}")
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


def _jsonl(path: Path, field: str) -> Iterator[str]:
    number = 0
    try:
        with open_binary(path) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                yield _line_text(line, field, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number} ({error})") from None


def _line_text(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); mend or remove the line") from None
    return _record_text(record, field, where)


def _record_text(record: object, field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise DataError(
            f'{where}: not a JSON object; each record must be one with a "{field}" field'
        )
    text = record.get(field)
    if not isinstance(text, str):
        if field in record:
            raise DataError(f'{where}: field "{field}" is not text; set data.text_field')
        names = ", ".join(sorted(record)[:8]) or "none"
        raise DataError(f'{where}: no field "{field}" (fields: {names}); set data.text_field')
    return text


def _parquet(path: Path, field: str) -> Iterator[str]:
    # Imported here: reading token files must not need Arrow's start-up time.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            schema = table.schema_arrow
            if field not in schema.names:
                names = ", ".join(schema.names[:8]) or "none"
                raise DataError(
                    f'{path}: no column "{field}" (columns: {names}); set data.text_field'
                )
            kind = schema.field(field).type
            if not (
                pa.types.is_string(kind)
                or pa.types.is_large_string(kind)
                or pa.types.is_string_view(kind)
            ):
                raise DataError(
                    f'{path}: column "{field}" holds {kind}, not text; set data.text_field'
                )
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    if value is not None:
                        yield value
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable Parquet file ({reason})") from None
