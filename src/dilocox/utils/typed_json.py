"""Dataclasses in JSON's values and back, by their type hints: for files that only dilocox reads."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from pydantic import BaseModel


@functools.cache
def fields_of(of: type) -> list[tuple[str, Any]]:
    """Names and types of what makes up a dataclass; what is worked out from the rest begins with
    an underscore."""
    hints = typing.get_type_hints(of)
    names = [field.name for field in dataclasses.fields(of) if not field.name.startswith("_")]
    return [(name, hints[name]) for name in names]


@functools.cache
def _row(of: type) -> Any:
    """What gives the fields of a dataclass in a row; none unless all are plain values."""
    if all(kind in (str, int, float, bool) for _, kind in fields_of(of)):
        return attrgetter(*(name for name, _ in fields_of(of)))
    return None


def encode(kind: Any, value: Any) -> Any:
    """`value`, whose type is `kind`, in JSON's values; `Any`: JSON's values themselves.

    A dict becomes a list of pairs: its keys need not be texts, and its order counts.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return encode(_some(inner), value)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return [encode(each, getattr(value, name)) for name, each in fields_of(kind)]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return value.model_dump(mode="json")
    if origin in (dict, Mapping):
        return [[encode(inner[0], k), encode(inner[1], v)] for k, v in value.items()]
    if origin in (set, frozenset):
        return sorted(encode(inner[0], each) for each in value)
    if origin is list:
        row = _row(typing.cast(type, inner[0])) if dataclasses.is_dataclass(inner[0]) else None
        return [row(v) for v in value] if row else [encode(inner[0], v) for v in value]
    if kind is bytes:
        return value.hex()
    if origin is tuple:
        return [encode(each, own) for each, own in zip(inner, value, strict=True)]
    return value


def decode(kind: Any, value: Any) -> Any:
    """Inverse of `_encode`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return decode(_some(inner), value)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        fields = zip(fields_of(kind), value, strict=True)
        return kind(**{name: decode(each, own) for (name, each), own in fields})
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_validate(value)
    if origin in (dict, Mapping):
        return {decode(inner[0], k): decode(inner[1], v) for k, v in value}
    if origin in (set, frozenset):
        return origin(decode(inner[0], each) for each in value)
    if origin is list:
        row = _row(typing.cast(type, inner[0])) if dataclasses.is_dataclass(inner[0]) else None
        return [inner[0](*v) for v in value] if row else [decode(inner[0], v) for v in value]
    if kind is bytes:
        return bytes.fromhex(value)
    if origin is tuple:
        return tuple(decode(each, own) for each, own in zip(inner, value, strict=True))
    return value


def _some(kinds: tuple[Any, ...]) -> Any:
    """The one type of `X | None`."""
    (found,) = [each for each in kinds if each is not types.NoneType]
    return found
