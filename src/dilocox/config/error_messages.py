"""Turns pydantic's errors about a run file into one line for users: key, reason and remedy."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dilocox.utils.plain_text import plain

# Priority of error types; lower is reported first. An unknown key goes before a missing key,
# since a misspelt key causes both.
_ORDER = {"extra_forbidden": 0, "missing": 2, "value_error": 3}
UNKNOWN_NAME = "unknown_name"
"""Type of the error of a name that nobody has registered; its context holds what is `known`."""
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text in quotes",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def first_problem(error: ValidationError, root: type[BaseModel]) -> str:
    """Returns one line about the most informative problem in `error`.

    `root` is the section class that was validated, such as `RunConfig`.
    """
    return plain(_first(error, root))  # values and keys may have line breaks, as terms by others


def _first(error: ValidationError, root: type[BaseModel]) -> str:
    problems = error.errors(include_url=False)
    problem = min(problems, key=lambda item: _ORDER.get(item["type"], 1))
    kind = problem["type"]
    path, section, field = _locate(problem["loc"], root)
    key = ".".join(path) or "run file"
    if kind == "value_error":
        reason = str(problem["ctx"]["error"])
        if not path:
            return reason  # checks across sections name their keys in the message
        own = _keys_below(path, root)
        return f"{key}.{reason}" if reason.split()[0] in own else f"{key}: {reason}"
    if kind == "extra_forbidden":
        return f"{key}: no such key{_nearest(path[-1], section)}"
    if kind == "missing" and not isinstance(problem["loc"][-1], int):
        return f"{key}: missing; add {_place(key, field)}"
    if problem["loc"][-1] == "[key]":
        return (
            f"{key}: not a name; use up to 31 lower-case letters, digits and hyphens, with a "
            "letter or digit first"
        )
    return f"{key}: got {_shown(problem['input'])}, expected {_expected(problem, field)}"


def _locate(
    loc: Sequence[int | str], root: type[BaseModel]
) -> tuple[list[str], type[BaseModel], FieldInfo | None]:
    """Returns the path of the key at `loc`, the section that holds it, and its field.

    A table of a list of tables is named by its number, from 1. Parts of `loc` that are not keys are
    left out. The field is None if the section has no such key.
    """
    path: list[str] = []
    section, field = root, None
    inside: Any = root
    for part in loc:
        if part == "[key]":
            break
        if _is_section(inside):
            section, field = inside, inside.model_fields.get(str(part))
            path.append(str(part))
            inside = None if field is None else _plain(field.annotation)
        elif typing.get_origin(inside) is dict:
            path.append(str(part))
            inside = typing.get_args(inside)[1]
        elif typing.get_origin(inside) is list and _is_section(typing.get_args(inside)[0]):
            path[-1] += f" (table {int(part) + 1})"
            inside = typing.get_args(inside)[0]
        else:
            break
    return path, section, field


def _is_section(kind: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _plain(annotation: Any) -> Any:
    """Returns an annotation without its `Annotated` metadata and without `None`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        left = [item for item in typing.get_args(annotation) if item is not type(None)]
        return _plain(left[0]) if len(left) == 1 else annotation
    return annotation


def _keys_below(path: Sequence[str], root: type[BaseModel]) -> set[str]:
    """Returns the keys of the section at `path`; empty if `path` is not a section."""
    _, section, field = _locate((*path, ""), root)
    return set(section.model_fields) if field is None else set()


def _place(key: str, field: FieldInfo | None) -> str:
    plain = None if field is None else _plain(field.annotation)
    if typing.get_origin(plain) is dict:
        return f"a table [{key}.NAME]"
    if isinstance(plain, type) and issubclass(plain, BaseModel):
        return f"the table [{key}]"
    return "it to the run file"


def _nearest(word: str, section: type[BaseModel]) -> str:
    known = list(section.model_fields)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f'; did you mean "{near[0]}"?'
    return f"; known here: {', '.join(known)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "a table"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expected(problem: Mapping[str, Any], field: FieldInfo | None) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        return f"a number {words} {context[limit]:g}"
    if kind == "string_pattern_mismatch":
        return (field and field.description) or f"a text of the form {context['pattern']}"
    if kind == UNKNOWN_NAME:
        return _one_of(context["known"])
    if kind == "finite_number":
        return "a finite number"
    annotation = None if field is None else _plain(field.annotation)
    return _words(annotation)


def _one_of(choices: Iterable[str]) -> str:
    return "one of: " + ", ".join(f'"{choice}"' for choice in choices)


def _words(annotation: Any) -> str:
    annotation = _plain(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        known = [item for item in arguments if item is not type(None)]
        return " or ".join(_words(item) for item in known)
    if origin is list:
        return f"a list, each {_words(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {_words(arguments[0])}"
    return _KINDS.get(annotation, "a table")
