"""Reads the records of a CSV or TSV file (RFC 4180), whose first line names the fields."""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from dilocox.data.packed_files import UNPACKED, open_binary
from dilocox.errors import DataError

LONGEST = 1 << 28
"""Largest number of characters of a field."""
_SEPARATORS = ",;\t|"
_TOLD = re.compile(r"sep=(.)\s*", re.IGNORECASE)
"""First line with which some programs name the separator."""


def csv_records(path: Path, numbers: Sequence[str] = ()) -> Iterator[tuple[str, object]]:
    """Yield (place, record) of each row; the place names the file and the row's first line.

    Values are text, and empty fields are empty text. Fields of `numbers` become numbers where they
    can be read as such. Fields are separated by tabs in a TSV file, else by the most frequent one
    of `, ; | tab` in the first line, or by the one that a line `sep=;` before it names. Fields with
    line ends or separators are quoted, in TSV files as well.

    Raises:
        DataError: if the file cannot be read, if a name is there twice, or if a row has more or
            fewer fields than the first line.
    """
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline="") as stream:
            yield from _rows(path, stream, numbers)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 text ({error.reason}); convert it, for example with iconv -f "
            "CP1252 -t UTF-8"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def _rows(
    path: Path, stream: io.TextIOWrapper, numbers: Sequence[str]
) -> Iterator[tuple[str, object]]:
    first, before = stream.readline(), 0
    while first and not first.strip():
        first, before = stream.readline(), before + 1
    separator = _separator(path, first)
    if _TOLD.fullmatch(first) is not None:
        first, before = stream.readline(), before + 1
    csv.field_size_limit(LONGEST)
    reader = csv.reader(chain([first], stream), delimiter=separator, strict=True)
    tabs = _is_tsv(path)
    names: list[str] | None = None
    while True:
        line = reader.line_num + 1
        where = f"{path}:{before + line}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{where}: not valid CSV ({error}); correct the row") from None
        if row is None:
            return
        if not row:
            continue
        if tabs and reader.line_num > line and any(separator in each for each in row):
            raise DataError(
                f"{where}: a quoted field holds a tab and a line end, so rows were probably not "
                "quoted; quote all fields that begin with a quotation mark, as in CSV"
            )
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
                record[name] = number_in(str(record[name]))
        yield where, record


def number_in(text: str) -> float | str:
    """Returns the number that `text` writes, or `text` if it writes none.

    Whole numbers are exact. Python reads `1_000` as a number; no table means that.
    """
    if "_" in text:
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_tsv(path: Path) -> bool:
    """Returns whether the name of a file says that tabs separate its fields."""
    return path.name.lower().endswith((".tsv", *(f".tsv{ending}" for ending in UNPACKED)))


def _separator(path: Path, first: str) -> str:
    told = _TOLD.fullmatch(first)
    if told is not None:
        return told[1]
    if _is_tsv(path):
        return "\t"
    outside = "".join(first.split('"')[::2])
    return max(_SEPARATORS, key=outside.count)


def _check_names(where: str, names: Sequence[str]) -> None:
    [(name, count)] = Counter(names).most_common(1)
    if count > 1:
        raise DataError(f'{where}: {count} columns are named "{name}"; rename all but one')
