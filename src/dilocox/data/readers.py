"""Reads the documents of one file: text, code, JSONL, CSV or Parquet.

Documents are streamed; a whole file is never in memory.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dilocox.data.arrow_values import json_record
from dilocox.data.columns import Document, numbers_of
from dilocox.data.csv_records import csv_records
from dilocox.data.json_text import object_of, parse_json, problem_of
from dilocox.data.packed_files import BLOCK, open_binary
from dilocox.data.record_filter import RecordFilter
from dilocox.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

CUT = {"text": 32 * 1024, "code": 512 * 1024}
"""Length in characters, by format, after which a long file is cut into documents. A file is long if
it has more than twice as many characters."""

FIELD = "set data.text_field to the name of one that holds text"
"""Remedy in messages about records whose text is not found."""

COLUMN = "set data.columns to the names of columns that hold numbers"
"""Remedy in messages about columns that are not found."""


def read_documents(
    path: Path,
    kind: str,
    text_field: str,
    without_text: Callable[[], None] = lambda: None,
    filter_: RecordFilter | None = None,
    columns: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the documents of `path` in file order, without blank ones.

    A text or code file is one document. `cut_point` cuts a long file into several documents, so
    that it need not fit into memory and can be held out in part. Each JSONL line, each object of a
    JSON array, and each row of CSV or Parquet is one document. All but Parquet files may be
    compressed (`packed_files.UNPACKED`).

    Args:
        path: the file.
        kind: its format: `text`, `code`, `jsonl`, `csv` or `parquet`.
        text_field: field or column that holds the text.
        without_text: is called for every record whose text is null or missing. Such a record is
            left out.
        filter_: decides which records are taken; None: all records.
        columns: fields of a record that hold a number; the document is a `Document` then.

    Raises:
        DataError: if the file cannot be read or holds no text. The message names the file and, for
            records, the line or the number.
    """
    documents: Iterator[str | None]
    if kind in ("jsonl", "csv"):
        takes = None if filter_ is None else partial(filter_.takes, typed=kind != "csv")
        documents = _texts(records_of(path, kind, columns), text_field, takes, columns)
    elif kind == "parquet":
        documents = _parquet(path, text_field, filter_, columns)
    else:
        documents = _text(path, CUT[kind])
    for document in documents:
        if document is None:
            without_text()
        elif document and not document.isspace():
            yield clean(document)


def clean(text: str) -> str:
    """Returns `text` with lone surrogates, which UTF-8 cannot encode, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cut_point(text: str, start: int, after: int) -> int | None:
    """Returns the end of the document that begins at `start`, or None if `text` is too short.

    The document ends after the first blank line between `after` and 2 · `after` characters. If
    there is no blank line, it ends after the first line end in this range. If there is no line end
    either, it ends after 2 · `after` characters.
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


def records_of(path: Path, kind: str, numbers: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield (place, record) of each record of a file of the format `jsonl` or `csv`.

    `numbers`: fields that hold numbers; CSV has text alone. Raises `DataError` as `json_records`
    and `csv_records`.
    """
    return csv_records(path, numbers) if kind == "csv" else json_records(path)


def json_records(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (place, record) of each JSON object of a file, which has one per line or one array.

    The place names the file and the line or the number of the record, for messages. Raises
    `DataError` if the file cannot be read or is not valid JSON.
    """
    return _array(path) if _is_array(path) else _jsonl(path)


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
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(f"{path}:record {number + 1}: {problem_of(error)}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after record {number} ({error})") from None


def _objects(stream: IO[str]) -> Iterator[object]:
    """Yield the elements of a JSON array. Raises `ValueError` if the array is malformed."""
    decoder = json.JSONDecoder(object_pairs_hook=object_of)
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
                # An error near the end of the buffer may only mean that more must be read.
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
        raise ValueError(f"{text.strip()[:16]!r} after the end of the array")


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
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {problem_of(error, line, 'the line')}") from None


def _texts(
    records: Iterator[tuple[str, object]],
    field: str,
    takes: Callable[[Mapping[str, Any]], bool] | None,
    columns: Sequence[str],
) -> Iterator[str | None]:
    """Yield the text of every record; None for a record whose text is null or missing.

    `records` are pairs of the place, which messages name, and the record. `takes` decides which
    records are taken; None: all records. Raises `DataError` if a record is not an object, if its
    text is of another type, or if no record has the field.
    """
    missing, found = None, False
    for where, record in records:
        if not isinstance(record, dict):
            raise DataError(
                f'{where}: not a JSON object; each record must be an object with a "{field}" field'
            )
        if takes is not None and not takes(record):
            continue
        if field not in record:
            names = ", ".join(sorted(record)[:8]) or "none"
            missing = missing or f'{where}: no field "{field}" (fields: {names})'
            yield None
            continue
        found, text = True, record[field]
        if text is not None and not isinstance(text, str):
            chat = (
                '; for chats, set data.format = "chat" and data.messages_field'
                if isinstance(text, list)
                else ""
            )
            kind = kind_of(text)
            raise DataError(f'{where}: field "{field}" is not text but {kind}; {FIELD}{chat}')
        yield with_columns(text, record, columns, where)
    if missing is not None and not found:
        raise DataError(f"{missing}; {FIELD}")


def with_columns(
    text: str | None, record: Mapping[str, Any], columns: Sequence[str], where: str
) -> str | None:
    """Returns the text of a record with the numbers of its columns; the text without columns.

    Raises `DataError` as `numbers_of`.
    """
    if not columns or text is None:
        return text
    return Document(clean(text)).with_columns(numbers_of(record, columns, where))


def kind_of(value: object) -> str:
    """Returns the kind of a JSON value, as words for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"


def _parquet(
    path: Path, field: str, filter_: RecordFilter | None, columns: Sequence[str]
) -> Iterator[str | None]:
    with _opened(path) as table:
        schema = table.schema_arrow
        kind = schema.field(_column(path, schema, field, FIELD)).type
        if not _holds_text(kind):
            raise DataError(f'{path}: column "{field}" holds {kind}, not text; {FIELD}')
        for name in columns:
            _column(path, schema, name, COLUMN)
        others = _columns_of(filter_, schema)
        read = _union([field, *columns], others)
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=read):
            taken = _taken(batch, others, filter_)
            records = batch.select([field, *columns]).to_pylist()
            for record, wanted in zip(records, taken, strict=True):
                row += 1
                if not wanted:
                    continue
                text = _decoded(record[field], f'{path}: column "{field}", row {row}')
                yield with_columns(text, record, columns, f"{path}:row {row}")


def _columns_of(filter_: RecordFilter | None, schema: pa.Schema) -> list[str]:
    """Returns the columns that the filter reads, and tells it the names of all columns."""
    if filter_ is None:
        return []
    filter_.know(schema.names)
    return filter_.columns(schema.names)


def _taken(
    batch: pa.RecordBatch, columns: Sequence[str], filter_: RecordFilter | None
) -> list[bool]:
    """Returns for each row of a batch whether the filter takes the row."""
    if filter_ is None:
        return [True] * batch.num_rows
    values = [batch.column(name).to_pylist() for name in columns]
    rows = zip(*values, strict=True) if values else iter([()] * batch.num_rows)
    return [filter_.takes(dict(zip(columns, row, strict=True))) for row in rows]


def _union(columns: Sequence[str], others: Sequence[str]) -> list[str]:
    return [*columns, *(name for name in others if name not in columns)]


def parquet_records(
    path: Path,
    fields: Sequence[str],
    optional: Sequence[str],
    mend: str,
    filter_: RecordFilter | None = None,
) -> Iterator[tuple[str, object]]:
    """Yield (place, record) of each row of a Parquet file that the filter takes.

    Values are as JSON has them, see `json_value`.

    Args:
        path: the file.
        fields: columns that the file must have; a record holds them by name.
        optional: columns that a record holds, too, if the file has them.
        mend: end of the message about a missing column.
        filter_: decides which rows are taken; None: all rows.

    Raises:
        DataError: if the file cannot be read, or if it does not have a column of `fields` once.
    """
    with _opened(path) as table:
        schema = table.schema_arrow
        for field in fields:
            _column(path, schema, field, mend)
        columns = [*fields, *(name for name in optional if name in schema.names)]
        others = _columns_of(filter_, schema)
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=_union(columns, others)):
            taken = _taken(batch, others, filter_)
            for record, wanted in zip(batch.select(columns).to_pylist(), taken, strict=True):
                row += 1
                if wanted:
                    yield f"{path}:row {row}", json_record(record, columns)


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Within this context, provide an open Parquet file. Raises `DataError` if reading fails."""
    # Imported here because Arrow is slow to import, and opening token files does not need it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            yield table
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable Parquet file ({reason})") from None


def _column(path: Path, schema: pa.Schema, field: str, mend: str) -> int:
    """Returns the number of column `field`. Raises `DataError` unless there is exactly one."""
    columns = schema.get_all_field_indices(field)
    if not columns:
        names = ", ".join(schema.names[:8]) or "none"
        raise DataError(f'{path}: no column "{field}" (columns: {names}); {mend}')
    if len(columns) > 1:
        raise DataError(f'{path}: {len(columns)} columns are named "{field}"; rename all but one')
    return int(columns[0])


def _holds_text(kind: pa.DataType) -> bool:
    """Returns whether a column of type `kind` may hold text.

    Types that may hold text are strings, bytes (UTF-8 without the annotation), a dictionary of
    these, and columns of nulls.
    """
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
