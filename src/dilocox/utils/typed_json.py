"""Converts dataclasses to JSON values and back by their type hints.

The format is for files that only dilocox reads.
"""

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
    """Returns the names and types of the stored fields of dataclass `of`.

    Fields whose names begin with an underscore are left out, since they are computed from the
    others.
    """
    hints = typing.get_type_hints(of)
    names = [field.name for field in dataclasses.fields(of) if not field.name.startswith("_")]
    return [(name, hints[name]) for name in names]


@functools.cache
def _row(of: type) -> Any:
    """Returns a function that gives the fields of a dataclass instance as a tuple.

    Returns None unless all fields are str, int, float or bool.
    """
    if all(kind in (str, int, float, bool) for _, kind in fields_of(of)):
        return attrgetter(*(name for name, _ in fields_of(of)))
    return None


def encode(kind: Any, value: Any) -> Any:
    """Convert `value` of type `kind` to JSON values. With kind `Any`, `value` is returned as it is.

    A dict becomes a list of pairs, because its keys need not be strings and its order must be kept.
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
    """Convert JSON values that `encode` made back to a value of type `kind`."""
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
    """Returns X from the arguments of `X | None`."""
    (found,) = [each for each in kinds if each is not types.NoneType]
    return found
