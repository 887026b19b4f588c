"""Packs documents whole into rows of equal length: best fit, longest documents first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def best_fit(lengths: Numbers, room: int) -> Numbers:
    """Returns the number of each document's row: int64 [n]. Pure.

    Best fit decreasing (Johnson 1973): at most 11/9 of the smallest possible number of rows, plus a
    constant. Documents are placed from the longest to the shortest; of equal documents the first
    comes first. A document goes into the row in which it leaves the least room. Of equal rows it
    goes into the youngest.

    Args:
        lengths: positions that each document takes, 1 to `room`, int64 [n].
        room: positions of a row.

    Raises:
        ValueError: if a length is outside 1..`room`.
    """
    if len(lengths) and not (int(lengths.min()) >= 1 and int(lengths.max()) <= room):
        raise ValueError(f"lengths must be 1 to {room}")
    rows = np.empty(len(lengths), dtype=np.int64)
    free: list[list[int]] = [[] for _ in range(room + 1)]
    """Rows by the room that is left in them."""
    has = 0
    """Bit r is set if some row has room r left."""
    count = 0
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = has >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = free[left].pop()
            if not free[left]:
                has ^= 1 << left
        else:
            left, row = room, count
            count += 1
        rows[document] = row
        left -= length
        if left:
            free[left].append(row)
            has |= 1 << left
    return rows
