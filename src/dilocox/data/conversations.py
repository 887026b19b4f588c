"""Reads conversations: records with messages in OpenAI's form, or with a prompt and a completion.

A conversation is kept as canonical JSON text, so that it is hashed, counted and held out like a
document of text. `dilocox.data.chat_encoding` makes tokens of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dilocox.config.data import DataSection
from dilocox.data.columns import Document, numbers_of
from dilocox.data.messages import checked_messages, list_of, messages_of, turns_of
from dilocox.data.readers import clean, kind_of, parquet_records, records_of
from dilocox.data.record_filter import RecordFilter
from dilocox.errors import DataError

SYSTEM = ("system", "developer")
"""Roles of a message with instructions, which comes first."""

_MESSAGES = "set data.messages_field to the name of one that holds messages"
ANSWERS = ("chosen", "rejected")
"""Fields of a pair of answers."""

_ANSWERS = "each record needs the better answer in chosen and the other one in rejected"
_PAIRS = "set data.prompt_field and data.completion_field"

LEARNED = (
    'give conversations with messages of the role "assistant" and without weight 0, a chat '
    'template whose {% generation %} blocks hold them, or data.loss_on = "all"'
)
"""Remedy in messages about conversations of which no token is learned."""


class Conversation(Document):
    """Canonical JSON text of one conversation, with the place of its record for messages.

    The JSON object has `messages` and perhaps `tools`, or `prompt` and `completion`. A pair of
    answers has `chosen` and `rejected`, each of which is such an object.
    """

    where: str

    def __new__(cls, content: Mapping[str, Any], where: str) -> Conversation:
        """Write `content` as JSON text; `where` names the file and the line of the record.

        Raises `DataError`, which begins with `where`, if JSON cannot hold a value.
        """
        try:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            reason = next(_not_json(content), f"cannot be written as JSON ({error})")
            raise DataError(f"{where}: {reason}") from None
        made = super().__new__(cls, clean(text))
        made.where = where
        return made

    def texts(self) -> str:
        """Returns the texts of the messages, for the training of a tokenizer."""
        content = json.loads(self)
        if "chosen" in content:
            return "\n".join(each.texts() for each in self.answers())
        if "prompt" in content:
            return f"{content['prompt']}\n{content['completion']}"
        return "\n".join(each["content"] for each in content["messages"] if each.get("content"))

    def answers(self) -> list[Conversation]:
        """Returns the chosen and the rejected conversation of a pair."""
        content = json.loads(self)
        return [Conversation(content[name], self.where) for name in ANSWERS]


@dataclass(frozen=True)
class Layout:
    """The fields in which records keep their conversation."""

    format: str
    """`chat`, `instruction` or `preference`."""
    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    behind: tuple[str, ...] = ()
    """Fields whose texts are joined to the prompt."""
    columns: tuple[str, ...] = ()
    """Fields that hold the number of each column."""

    @classmethod
    def of(cls, data: DataSection) -> Layout | None:
        """Returns the layout that `data` names, or None if its format is text."""
        if not data.has_conversations:
            return None
        prompt, *behind = data.prompt_fields
        fields = (data.messages_field, prompt, data.completion_field)
        return cls(data.format, *fields, tuple(behind), tuple(data.columns))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that records must have."""
        if self.format == "preference":
            return ANSWERS
        return (self.messages,) if self.format == "chat" else (self.prompt, self.completion)

    @property
    def optional(self) -> tuple[str, ...]:
        """Fields that records may have, those that are refused included."""
        more = (self.prompt,) if self.format == "preference" else ()
        named = (*more, *self.behind, "system", "tools", *self.columns, *self._refused)
        return tuple(name for name in named if name not in self.fields)

    @cached_property  # read for every record
    def _refused(self) -> dict[str, str]:
        """Fields that other libraries read beside these, with the remedy of a record that has one.

        The content of such a field would be left out in silence.
        """
        found = {"functions": "write the functions as tools"}
        if self.format == "instruction":
            found["history"] = 'give all turns as messages, and set data.format = "chat"'
            if self.prompt == "instruction":
                for name in ("input", "context"):
                    found[name] = f'set data.prompt_field = ["instruction", "{name}"], or remove it'
        named = {*self.fields, *self.behind, *self.columns}
        return {name: mend for name, mend in found.items() if name not in named}

    @property
    def mend(self) -> str:
        """Remedy in messages about records without the fields."""
        if self.format == "preference":
            return _ANSWERS
        return _MESSAGES if self.format == "chat" else _PAIRS

    def parse(self, record: Mapping[str, Any], where: str) -> Conversation | None:
        """Returns the conversation of a record, or None if its fields are missing, null or empty.

        Raises `DataError`, which begins with `where`, if the fields hold something else.
        """
        content = self._content(record, where)
        if content is None:
            return None
        if self.format == "preference":
            content = {name: self._led(each, record, where) for name, each in content.items()}
        else:
            content = self._led(content, record, where)
        made = Conversation(content, where)
        self._check_unread(record, where)
        if self.columns:
            made.columns = numbers_of(record, self.columns, where)
        return made

    def _content(self, record: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        """Returns the content of the conversation without the field `system`, or None."""
        if self.format == "preference":
            return _pair(record, self.prompt, self._prompt(record, where), where)
        if self.format == "instruction":
            return self._completed(record, where)
        messages = list_of(record.get(self.messages), where, self.messages)
        if not messages:
            return None
        tools = list_of(record.get("tools"), where, "tools")
        made = {"messages": checked_messages(messages, where)}
        return made | ({"tools": tools} if tools else {})

    def _led(
        self, content: dict[str, Any], record: Mapping[str, Any], where: str
    ) -> dict[str, Any]:
        """Returns a conversation with the message of the field `system` as its first one."""
        messages = turns_of(content)
        system = self._system(record, messages[0], where)
        if not system:
            return content
        tools = {"tools": content["tools"]} if "tools" in content else {}
        return {"messages": [*system, *messages]} | tools

    def _system(
        self, record: Mapping[str, Any], first: Mapping[str, Any], where: str
    ) -> list[dict[str, Any]]:
        """Returns the message of the field `system`, or none if the messages begin with it."""
        named = (*self.fields, self.prompt, *self.behind, *self.columns)
        text = None if "system" in named else record.get("system")
        if not text or _is_blank(text):
            return []
        place = f'{where}: field "system", which is read as the first message'
        made = checked_messages([{"role": "system", "content": text}], place)
        if first["role"] not in SYSTEM:
            return made
        if first.get("content") != made[0]["content"]:
            raise DataError(
                f'{where}: field "system" differs from the first message, whose role is '
                f"{first['role']}; remove one of the two"
            )
        return []

    def _completed(self, record: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        """Returns a prompt and its completion, which are both text or both lists of messages."""
        prompt: Any = self._prompt(record, where)
        completion: Any = messages_of(record.get(self.completion), where, self.completion)
        if prompt is None or completion is None:
            return None
        if isinstance(prompt, list) and isinstance(completion, list):
            return _continued(prompt, completion, record, where)
        for field, text in ((self.prompt, prompt), (self.completion, completion)):
            if not isinstance(text, str):
                raise DataError(
                    f'{where}: field "{field}" is not text but {kind_of(text)}; {_PAIRS} to the '
                    "names of fields that are both text, or both lists of messages"
                )
        if not completion.strip():
            return None
        return {"prompt": prompt, "completion": completion}

    def _prompt(self, record: Mapping[str, Any], where: str) -> object:
        """Returns the field of the prompt, joined with the texts of the fields behind it."""
        first = messages_of(record.get(self.prompt), where, self.prompt)
        fields = {self.prompt: first} | {name: record.get(name) for name in self.behind}
        given: dict[str, Any] = {
            name: value
            for name, value in fields.items()
            if value is not None and not _is_blank(value)
        }
        if len(given) < 2:
            return next(iter(given.values()), first)
        for name, value in given.items():
            if not isinstance(value, str):
                raise DataError(
                    f'{where}: field "{name}" is not text but {kind_of(value)}; the fields of '
                    "data.prompt_field are joined, so all must be text"
                )
        return "\n\n".join(given.values())

    def _check_unread(self, record: Mapping[str, Any], where: str) -> None:
        """Raise `DataError` if a field has content that would be left out in silence."""
        for name, mend in self._refused.items():
            value = record.get(name)
            if not value or not isinstance(value, str | list) or value in ("[]", "null"):
                continue
            if _is_blank(value):
                continue
            raise DataError(
                f'{where}: field "{name}" is not read, so its content would be left out; {mend}'
            )


def read_conversations(
    path: Path,
    kind: str,
    layout: Layout,
    without: Callable[[], None],
    filter_: RecordFilter | None = None,
) -> Iterator[Conversation]:
    """Yield the conversations of a file in file order.

    Args:
        path: the file.
        kind: `parquet`, `csv`, or `jsonl`, which also holds one JSON array.
        layout: fields of the records.
        without: is called for every record without a conversation, which is left out.
        filter_: decides which records are taken; None: all records.

    Raises:
        DataError: if the file cannot be read, or if a record is not as `layout` says. The message
            names the file and the line or row.
    """
    records = (
        parquet_records(path, layout.fields, layout.optional, layout.mend, filter_)
        if kind == "parquet"
        else records_of(path, kind, layout.columns)
    )
    missing, found, typed = "", False, kind != "csv"
    unseen = dict.fromkeys(layout.behind)
    fields: dict[str, None] = {}
    for where, record in records:
        if not isinstance(record, dict):
            names = " and ".join(f'"{name}"' for name in layout.fields)
            raise DataError(
                f"{where}: not a JSON object; each record must be an object with {names}"
            )
        # The rows of Parquet files are filtered already, by columns that `record` may lack.
        if filter_ is not None and kind != "parquet" and not filter_.takes(record, typed=typed):
            continue
        lacking = [name for name in layout.fields if name not in record]
        if lacking:
            names = ", ".join(sorted(record)[:8]) or "none"
            missing = (
                missing or f'{where}: no field "{lacking[0]}" (fields: {names}); {layout.mend}'
            )
        found = found or not lacking
        if unseen:
            fields |= dict.fromkeys(list(record)[:8])
            unseen = {name: None for name in unseen if name not in record}
        conversation = layout.parse(record, where)
        if conversation is None:
            without()
        else:
            yield conversation
    if missing and not found:
        raise DataError(missing)
    if found and unseen:
        raise DataError(
            f'{path}: no record has the field "{next(iter(unseen))}" of data.prompt_field (fields: '
            f"{', '.join(fields)}); correct the name, or leave it out"
        )


def conversation_lines(content: dict[str, Any]) -> list[str]:
    """Returns lines about conversations for `show`, or none if the documents are text.

    `content` is that of the manifest.
    """
    about = content.get("conversations")
    if about is None:
        return []
    ends = ", ".join(end["token"] for end in about["end_of_turn"])
    template = "the tokenizer's chat template" if about["chat_template"] else "no chat template"
    lines = [
        f"format       {about['format']}, {template}, loss on {about['loss_on']}; messages of the "
        f"assistant end with {ends}"
    ]
    left = about["without_labels"]
    if left:
        noun = "conversation" if left == 1 else "conversations"
        lines.append(f"left out     {left:,} {noun} of which no token is learned")
    return lines


def _pair(
    record: Mapping[str, Any], prompt_field: str, prompt: object, where: str
) -> dict[str, Any] | None:
    """Returns the conversations of two answers, or None if one is missing, null or empty.

    Raises `DataError`, which begins with `where`, if the two cannot be compared.
    """
    given = [messages_of(record.get(name), where, name) for name in ANSWERS]
    if any(not each or _is_blank(each) for each in given):
        return None
    if all(isinstance(each, str) for each in given):
        if not isinstance(prompt, str):
            raise DataError(
                f'{where}: field "{prompt_field}" is not text, and chosen and rejected are; give '
                "text, or lists of messages in all three"
            )
        made: list[dict[str, Any]] = [{"prompt": prompt, "completion": each} for each in given]
    else:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        before = list_of(prompt, where, prompt_field) or []
        tools = list_of(record.get("tools"), where, "tools")
        made = []
        for name, each in zip(ANSWERS, given, strict=True):
            messages = checked_messages([*before, *(list_of(each, where, name) or [])], where)
            made.append({"messages": messages} | ({"tools": tools} if tools else {}))
        chosen, rejected = (each["messages"] for each in made)
        if chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
            raise DataError(f"{where}: chosen and rejected must end with a message of assistant")
        if chosen[:-1] != rejected[:-1]:
            raise DataError(
                f"{where}: chosen and rejected differ before their last message; answers can be "
                "compared after the same messages only"
            )
    if made[0] == made[1]:
        raise DataError(f"{where}: chosen and rejected are equal; remove the record")
    return dict(zip(ANSWERS, made, strict=True))


def _continued(
    prompt: list[Any], completion: list[Any], record: Mapping[str, Any], where: str
) -> dict[str, Any] | None:
    """Returns the messages of a prompt and of its completion, or None if the latter is empty.

    Answers in the prompt are not learned.
    """
    given = [list_of(prompt, where, "prompt"), list_of(completion, where, "completion")]
    if not given[1]:
        return None
    messages = checked_messages([*(given[0] or []), *given[1]], where)
    for each in messages[: len(prompt)]:
        if each["role"] == "assistant":
            each["weight"] = 0
    tools = list_of(record.get("tools"), where, "tools")
    return {"messages": messages} | ({"tools": tools} if tools else {})


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


def _not_json(value: object, place: str = "") -> Iterator[str]:
    """Yield the place of each value that JSON cannot hold, with reason and remedy."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _not_json(each, f'{place}, "{key}"')
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value, start=1):
            yield from _not_json(each, f"{place}, entry {number}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield (
                f"{place.removeprefix(', ')} is {value}, which JSON cannot hold; give a finite "
                "number, or remove the key"
            )
    elif value is not None and not isinstance(value, str | int):
        yield (
            f"{place.removeprefix(', ')} is of type {type(value).__name__}, which JSON cannot "
            "hold; give text or a number, or remove the key"
        )
