"""Checks the messages of a conversation, and brings them into one form, which is OpenAI's.

Messages of ShareGPT's form have `from` and `value`. Axolotl's have `train`, like `weight` here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dilocox.data.json_text import DoubleKeyError, parse_json, problem_of
from dilocox.data.readers import kind_of
from dilocox.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have."""

_OBJECTS = re.compile(r"\s*\[\s*\{")
_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")
_MESSAGE = re.compile(r'"(role|from)"\s*:')

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""The role of each speaker that `from` of ShareGPT's form may name."""


def checked_messages(messages: list[Any], where: str) -> list[dict[str, Any]]:
    """Returns messages with `role`, and with their content as one text and without null values.

    Raises `DataError`, which begins with `where`, if one of them is no message, or if something
    of it would be left out.
    """
    return [
        _message(each, f"{where}: message {number}")
        for number, each in enumerate(messages, start=1)
    ]


def turns_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a conversation: its own, or those of its prompt and completion."""
    return content.get("messages") or [
        {"role": "user", "content": content["prompt"]},
        {"role": "assistant", "content": content["completion"]},
    ]


def messages_of(value: object, where: str, field: str) -> object:
    """Returns the list of messages that a table holds as JSON text, or else `value`.

    Text that only looks like JSON, such as an answer in JSON, stays text. Raises `DataError`,
    which begins with `where`, for a list of messages that Python has written, not JSON.
    """
    if not isinstance(value, str) or not _OBJECTS.match(value):
        return value
    if _PYTHON.match(value):
        raise DataError(
            f'{where}: field "{field}" holds messages as Python writes them, not as JSON; write '
            "them with json.dumps"
        )
    try:
        found: Any = parse_json(value)
    except DoubleKeyError as error:
        if _MESSAGE.search(value) is None:
            return value
        raise DataError(f'{where}: field "{field}": {problem_of(error)}') from None
    except (ValueError, RecursionError):
        return value
    pairs = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    known = all(
        isinstance(each, dict) and any(pair <= each.keys() for pair in pairs) for each in found
    )
    return found if known else value


def list_of(value: object, where: str, field: str) -> list[Any] | None:
    """Returns a list, which may be written as JSON text. Raises `DataError` if it is no list."""
    if isinstance(value, str):
        # Parquet columns often hold lists of objects with different keys as JSON text.
        try:
            value = parse_json(value or "null")
        except DoubleKeyError as error:
            raise DataError(f'{where}: field "{field}": {problem_of(error)}') from None
        except (ValueError, RecursionError):
            pass  # refused below, as text
    if value is None:
        return None
    if not isinstance(value, list):
        raise DataError(
            f'{where}: field "{field}" is not a list but {kind_of(value)}; it must hold a '
            "list of objects"
        )
    for number, each in enumerate(value, start=1):
        if not isinstance(each, dict):
            raise DataError(
                f'{where}: entry {number} of "{field}" is {kind_of(each)}; it must be an object'
            )
    return value


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a message with its content as one text and without null values."""
    if "from" in message and message.get("role") is None:
        message = _of_speaker(message, where)
    role = message.get("role")
    if role not in ROLES:
        other = ""
        if role == "function":
            other = "; results of calls have the role tool, and calls are in tool_calls"
        named = f'role "{role}"' if isinstance(role, str) else "no role"
        raise DataError(f"{where}: {named}; a role is one of {', '.join(ROLES)}{other}")
    made = {key: value for key, value in message.items() if value is not None}
    if made.get("function_call"):
        raise DataError(
            f"{where}: function_call is the former form of tool_calls and would be left out; write "
            "the call as tool_calls"
        )
    content = made.get("content")
    if content is not None:
        made["content"] = _joined(content, where)
    calls = list_of(made.get("tool_calls"), where, "tool_calls")
    made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = [_call(call, where) for call in calls]
    if "content" not in made and not calls:
        raise DataError(f'{where}: no "content"; give text, or tool_calls')
    if made.get("weight", 1) not in (0, 1):
        raise DataError(f"{where}: weight {made['weight']!r}; give 0 (no loss on it) or 1")
    learned = made.pop("train", None)
    if learned is not None:
        if not isinstance(learned, bool) or "weight" in made:
            raise DataError(
                f"{where}: train must be true or false (no loss on it), without weight beside it"
            )
        made |= {} if learned else {"weight": 0}
    return made


def _of_speaker(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a message of ShareGPT's form with `role` and `content`."""
    speaker = message["from"]
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        named = f'"{speaker}"' if isinstance(speaker, str) else kind_of(speaker)
        raise DataError(
            f"{where}: from is {named}; it is one of {', '.join(SPEAKERS)}; write calls of tools "
            "and their results with role, content and tool_calls"
        )
    if message.get("content") is not None:
        raise DataError(f"{where}: content beside from; write role and content, or from and value")
    made = {key: value for key, value in message.items() if key not in ("from", "value")}
    return made | {"role": role, "content": message.get("value")}


def _joined(content: object, where: str) -> str:
    """Returns the text of a message, which is text or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(
            f"{where}: content is {kind_of(content)}; give text or a list of text parts"
        )
    texts = []
    for number, part in enumerate(content, start=1):
        place = f"{where}: part {number} of its content"
        if not isinstance(part, dict):
            raise DataError(
                f'{place} is {kind_of(part)}; write a part as {{"type": "text", "text": ...}}'
            )
        kind, text = part.get("type", "text"), part.get("text")
        if kind != "text":
            raise DataError(f"{place} is of type {kind}; only text can be trained on")
        if not isinstance(text, str):
            raise DataError(f'{place} has no text in "text"; give text, or remove the part')
        texts.append(text)
    return "".join(texts)


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns a tool call whose arguments are an object: OpenAI's form has them as JSON text."""
    made = {key: value for key, value in call.items() if value is not None}
    inner = made.get("function", made)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise DataError(f"{where}: a tool call without a function's name")
    inner = {key: value for key, value in inner.items() if value is not None}
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except DoubleKeyError as error:
            raise DataError(
                f'{where}: the arguments of the call of "{inner["name"]}": {problem_of(error)}'
            ) from None
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise DataError(
            f'{where}: the arguments of the call of "{inner["name"]}" are not a JSON object; '
            "correct or remove the record"
        )
    inner["arguments"] = arguments
    return made | {"function": inner} if "function" in made else inner
