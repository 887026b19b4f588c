"""Reads the records of a CSV or TSV file (RFC 4180), whose first line names the fields."""

from __future__ import annotations

import csv
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dilocox.data.packed_files import open_binary
from dilocox.errors import DataError

LONGEST = 1 << 28
"""Largest number of characters of a field."""
_SEPARATORS = ",;\t|"


def csv_records(path: Path, numbers: Sequence[str] = ()) -> Iterator[tuple[str, object]]:
    """Yield (place, record) of each row; the place names the file and the row's first line.

    Values are text, and empty fields are empty text. Fields of `numbers` become numbers where they
    can be read as such. Fields are separated by tabs in a TSV file, else by the most frequent one
    of `, ; | tab` in the first line. Fields with line ends or separators are quoted.

    Raises:
        DataError: if the file cannot be read, if a name is there twice, or if a row has more or
            fewer fields than the first line.
    """
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline="") as stream:
            yield from _rows(path, stream, numbers)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def _rows(
    path: Path, stream: io.TextIOWrapper, numbers: Sequence[str]
) -> Iterator[tuple[str, object]]:
    first = stream.readline()
    separator = _separator(path, first)
    csv.field_size_limit(LONGEST)
    reader = csv.reader(_with(first, stream), delimiter=separator, strict=True)
    names: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{where}: not valid CSV ({error}); correct the row") from None
        if row is None:
            return
        if not row:
            continue
        if names is None:
            names = row
            _check_names(where, names)
            continue
        if len(row) != len(names):
            raise DataError(
                f"{where}: {len(row)} fields, and the first line names {len(names)}; put fields "
                f"that contain {separator!r} or a line end between quotes"
            )
        record: dict[str, object] = dict(zip(names, row, strict=True))
        for name in numbers:
            if name in record:
                record[name] = _number(str(record[name]))
        yield where, record


def _with(first: str, stream: io.TextIOWrapper) -> Iterator[str]:
    yield first
    yield from stream


def _separator(path: Path, first: str) -> str:
    if ".tsv" in path.suffixes[-2:]:
        return "\t"
    outside = "".join(first.split('"')[::2])
    return max(_SEPARATORS, key=outside.count)


def _check_names(where: str, names: Sequence[str]) -> None:
    [(name, count)] = Counter(names).most_common(1)
    if count > 1:
        raise DataError(f'{where}: {count} columns are named "{name}"; rename all but one')


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text
