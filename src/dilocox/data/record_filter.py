"""Takes those records of a source whose fields have the values that `data.filter` names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dilocox.config.data_filter import Scalar
from dilocox.data.csv_records import number_in
from dilocox.errors import DataError

NAMES = 12
"""Most field names in a message."""
VALUES = 6
"""Most values of a field in a message."""
KNOWN = 256
"""Most field names that are kept for a message."""
_SHOWN = 40
"""Most characters of a value in a message."""
_MISSING = object()
_TRUTH = {"true": True, "false": False}


class RecordFilter:
    """Decides record by record, and counts the records of one pass over a source."""

    def __init__(self, wanted: Mapping[str, Scalar | list[Scalar]]) -> None:
        """Prepare. `wanted` holds the value, or the list of values, that each field must have."""
        self.wanted = dict(wanted)
        self._choices = {
            name: value if isinstance(value, list) else [value] for name, value in wanted.items()
        }
        self.begin()

    def begin(self) -> None:
        """Forget the counts: a new pass over the source begins."""
        self.read = 0
        """Records that this pass has read."""
        self.taken = 0
        """Records among them that have all values."""
        self._held: dict[str, dict[str, None]] = {name: {} for name in self._choices}
        self._known: dict[str, None] = {}

    def takes(self, record: Mapping[str, Any], *, typed: bool = True) -> bool:
        """Returns whether `record` has all values, and counts the record.

        Without `typed`, as in CSV, numbers and truth values are text in the record.
        """
        self.read += 1
        taken = True
        for name, choices in self._choices.items():
            value = _value(record, name)
            if value is _MISSING:
                self.know(_names(record, name))
                taken = False
                continue
            held = self._held[name]
            if len(held) <= VALUES:
                held[_text(value)] = None
            taken = taken and any(_equal(value, choice, typed) for choice in choices)
        self.taken += taken
        return taken

    def know(self, names: Iterable[str]) -> None:
        """Keep the names of fields that records have, for a message about a missing field."""
        for name in names:
            if len(self._known) < KNOWN:
                self._known[name] = None

    def columns(self, there: Sequence[str]) -> list[str]:
        """Returns those of the columns `there` that hold fields of the filter."""
        found = [column for name in self._choices for column in columns_of(name, there)]
        return list(dict.fromkeys(found))


def columns_of(name: str, there: Sequence[str]) -> list[str]:
    """Returns the column of `there` that holds field `name` of records, or nothing."""
    column = name if name in there else name.partition(".")[0]
    return [column] if column in there else []


def check_taken(filters: Sequence[RecordFilter | None], names: Sequence[str]) -> None:
    """Raise `DataError` if no record was taken of the sources `names`, which were read to the end.

    `filters`: the filter of each source; None: the source has none.
    """
    own = [each for each in filters if each is not None]
    if not own or any(each is None or each.taken for each in filters):
        return
    place = f"data.source {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    read = sum(each.read for each in own)
    parts = []
    for name in own[0].wanted:
        held = list(dict.fromkeys(text for each in own for text in each._held[name]))
        if not held:
            known = sorted({field for each in own for field in each._known})
            beside = f"{name.rpartition('.')[0]}."
            known = [field for field in known if field.startswith(beside)] or known
            raise DataError(
                f'{place}: none of the {read:,} records has the field "{name}" of the filter '
                f"(fields: {_listed(known, NAMES)}); correct the filter"
            )
        parts.append(f"{name} is {_listed(held, VALUES)}")
    raise DataError(
        f"{place}: the filter takes none of the {read:,} records ({'; '.join(parts)}); correct the "
        "filter"
    )


def filter_text(wanted: Mapping[str, Scalar | list[Scalar]]) -> str:
    """Returns a filter as text: `language = "en", stars = 4 or 5`, sorted by name."""
    return ", ".join(
        f"{name} = {' or '.join(map(_text, value if isinstance(value, list) else [value]))}"
        for name, value in sorted(wanted.items())
    )


def _value(record: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field, whose name may lead into nested objects by dots."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first) if dot else None
    return _value(inner, rest) if isinstance(inner, Mapping) else _MISSING


def _names(record: Mapping[str, Any], name: str, before: str = "") -> list[str]:
    """Returns the names of the fields beside the missing field `name`."""
    first, dot, rest = name.partition(".")
    inner = record.get(first) if dot else None
    if isinstance(inner, Mapping):
        return _names(inner, rest, f"{before}{first}.")
    return [before + str(each) for each in record]


def _equal(value: Any, choice: Scalar, typed: bool) -> bool:
    """Returns whether a field's value is `choice`. True is not 1, and 4.0 is 4."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if not typed and isinstance(value, str):
        if isinstance(choice, bool):
            value = _TRUTH.get(value.strip().lower(), value)
        elif not isinstance(choice, str):
            value = number_in(value)
    if isinstance(value, bool) or isinstance(choice, bool):
        return value is choice
    return bool(value == choice)


def _text(value: Any) -> str:
    """Returns a value as one short text, in the form of JSON."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _listed(texts: Sequence[str], most: int) -> str:
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "") if texts else "none"
