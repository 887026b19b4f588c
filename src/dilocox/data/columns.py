"""Columns beside tokens: named numbers, one float32 per token of a split.

A record gives one number per column, which every token of the record's document gets. Trainers hand
columns to a loss of the user's own, aligned with the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dilocox.errors import DataError

COLUMN_DTYPE: np.dtype[Any] = np.dtype("<f4")
"""Type of a column's numbers on disk."""

_LARGEST = float(np.finfo(np.float32).max)

_MEND = "give every record a finite number there, or take the name out of data.columns"

Columns = Mapping[str, npt.NDArray[np.float32]]
"""Columns by name, float32 [n, L] each."""


class Document(str):
    """The text of a document, with the number of each column."""

    columns: tuple[float, ...] = ()

    def with_columns(self, columns: tuple[float, ...]) -> Document:
        """Set the numbers, in the order of `data.columns`. Returns this document."""
        self.columns = columns
        return self


def columns_of(document: str) -> tuple[float, ...]:
    """Returns the numbers of a document's columns; none if the document is text alone."""
    return document.columns if isinstance(document, Document) else ()


def numbers_of(record: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[float, ...]:
    """Returns the numbers of a record's columns, rounded to float32.

    Raises `DataError`, which begins with `where`, if a field holds no finite number.
    """
    found = []
    for name in names:
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = "is missing or null" if value is None else "is not a number"
            raise DataError(f'{where}: column "{name}" {kind}; {_MEND}')
        number = float(np.float32(value)) if abs(value) <= _LARGEST else np.inf
        if not np.isfinite(number):
            raise DataError(f'{where}: column "{name}" is no finite float32 number; {_MEND}')
        found.append(number)
    return tuple(found)


def check_same_columns(folder: object, made: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise `DataError` unless token files have the columns that the run file names."""
    if sorted(made) != sorted(wanted):
        raise DataError(
            f"{folder}: its token files have the columns {sorted(made)}, and data.columns is "
            f"{sorted(wanted)}; set data.folder to another folder or delete this one, or name the "
            "same columns"
        )


def targets(labels: npt.NDArray[np.int64], columns: Columns | None) -> npt.NDArray[np.int64]:
    """Returns labels with columns beside them in one array, as `dilocox.inner.columns` takes them.

    Args:
        labels: int64 [n, L].
        columns: float32 [n, L] by name; None: there are none.

    Returns:
        int64 [n, 1 + columns, L]: the labels, then the bits of each column in the order of the
        names. Without columns: `labels`.
    """
    if not columns:
        return labels
    bits = [np.ascontiguousarray(columns[name]).view(np.int32) for name in sorted(columns)]
    return np.stack([labels, *(each.astype(np.int64) for each in bits)], axis=1)
