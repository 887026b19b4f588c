"""Values of Arrow columns in the form of JSON: of Parquet files and of datasets of the hub."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID


def json_record(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the columns `names` of a record as JSON has them, without those that it lacks."""
    return {name: json_value(record[name]) for name in names if name in record}


def json_value(value: Any) -> Any:
    """Returns a value as a JSON record of the same content has it.

    Arrow gives every object of a column all keys that any object of the column has. So null keys of
    objects are left out, at every depth. Nulls in lists stay.

    Dates and times become ISO 8601 text, UUIDs text, decimals numbers, and bytes in UTF-8 text.
    Other values of types that JSON lacks stay as they are.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {key: json_value(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [json_value(each) for each in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value
