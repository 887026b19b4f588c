"""Renders conversations by a chat template, and finds the characters that are learned.

Templates are Jinja texts, rendered by transformers. Two additions: `strftime_now` gives a fixed
date, since token files must be the same on every day, and the characters of the assistant's
messages are found also for templates without `{% generation %}` blocks.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dilocox.errors import DataError

Messages = Sequence[Mapping[str, Any]]
Spans = tuple[tuple[int, int], ...]
"""Ranges [start, end) of characters, in order."""

DATE = datetime.date(2024, 7, 26)
"""Date that templates with a date write. Templates of Llama write it where they know no date."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FORMATS = re.compile(r"strftime_now\(\s*(?:'([^']*)'|\"([^\"]*)\")\s*\)")
# Bars of DeepSeek's marks are full-width.
_MARKS = re.compile(
    "<[|\uff5c][^<>|\uff5c\\s'\"{}]{1,64}[|\uff5c]>"
    r"|<(?:start|end)_of_turn>|\[/?INST\]|<<?/?SYS>>?"
)
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys that hold the thoughts of an assistant's message."""
_MEND = (
    'set data.chat_template to a file with a template that does, or data.loss_on = "last" or "all"'
)


class TemplateError(Exception):
    """A conversation cannot be rendered or its learned characters cannot be found; see `str`."""


def marks_of(text: str) -> list[str]:
    """Returns what looks like control tokens in `text`, such as `<|im_start|>`, without doubles."""
    return list(dict.fromkeys(_MARKS.findall(text)))


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the values of its variables."""

    source: str
    """Jinja text."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Values that the template may name, such as `bos_token` and `eos_token`."""
    special: frozenset[str] = frozenset()
    """Special tokens of the tokenizer, of which one may end an assistant's message."""

    @property
    def has_generation(self) -> bool:
        """Whether the template marks what the assistant writes by `{% generation %}` blocks."""
        return _GENERATION.search(self.source) is not None

    def render(self, messages: Messages, tools: Any = None, prompt: bool = False) -> str:
        """Returns the text of a conversation.

        Args:
            messages: messages in OpenAI's form.
            tools: descriptions of tools; None: no tools.
            prompt: end the text with the beginning of an assistant's message.

        Raises:
            TemplateError: if the template refuses the conversation.
            DataError: if the template is not valid Jinja.
        """
        return self._render(messages, tools, prompt, False)[0]

    def learned(self, messages: Messages, tools: Any, loss_on: str) -> tuple[str, Spans]:
        """Returns the text of a conversation, and the characters that are learned.

        The characters of an assistant's message end with the token that ends the message, so that
        the model learns to stop. Messages with weight 0 are not learned.

        Args:
            messages: messages in OpenAI's form.
            tools: descriptions of tools; None: no tools.
            loss_on: `assistant`, `last` or `all`, see `data.loss_on`.

        Raises:
            TemplateError: if the template refuses the conversation, leaves out thoughts that are to
                be learned, or if the characters cannot be found.
        """
        self._check_thoughts(messages, loss_on)
        if loss_on == "all":
            text = self.render(messages, tools)
            return text, ((0, len(text)),)
        turns = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        if self.has_generation:
            text, found = self._render(messages, tools, False, True)
            spans = [self._to_end_of_turn(text, start, end) for start, end in found]
            if loss_on == "assistant" and all(messages[n].get("weight", 1) for n in turns):
                return text, tuple(spans)
            if len(spans) != len(turns):
                raise TemplateError(
                    f"the chat template marks {len(spans)} parts by {{% generation %}} for "
                    f"{len(turns)} messages of the assistant, so that single messages cannot be "
                    "chosen; leave out weight and data.loss_on"
                )
        else:
            text = self.render(messages, tools)
            wanted = turns[-1:] if loss_on == "last" else turns
            wanted = [n for n in wanted if messages[n].get("weight", 1)]
            by_turn = {n: self._turn(text, messages, n, tools) for n in wanted}
            spans = [by_turn.get(n, (0, 0)) for n in turns]
        if loss_on == "last":
            spans[:-1] = [(0, 0)] * len(spans[:-1])
        kept = zip(spans, turns, strict=True)
        return text, tuple(s for s, n in kept if s[1] > s[0] and messages[n].get("weight", 1))

    def _turn(self, text: str, messages: Messages, number: int, tools: Any) -> tuple[int, int]:
        """Returns the characters of an assistant's message, by the text before and up to it."""
        if number == 0:
            raise TemplateError(
                "begins with a message of the assistant, so that its beginning cannot be found "
                f"without {{% generation %}} in the chat template; {_MEND}"
            )
        try:
            before = self.render(messages[:number], tools, prompt=True)
            through = self.render(messages[: number + 1], tools)
        except TemplateError as error:
            raise TemplateError(f"up to message {number + 1}: {error}") from None
        # Some templates begin the assistant's message with something that a finished message lacks.
        if not text.startswith(before):
            before = self._open_end(text, self.render(messages[:number], tools))
        through = self._open_end(text, through)
        if not text.startswith(before) or not text.startswith(through):
            raise TemplateError(
                f"the chat template writes message {number + 1} or what stands before it "
                "differently when messages follow, and has no {% generation %}, so that the "
                f"assistant's part cannot be found; {_MEND}"
            )
        return self._to_end_of_turn(text, len(before), len(through))

    def _open_end(self, text: str, part: str) -> str:
        """Returns `part` as `text` begins with it, if only an end-of-text token is too much.

        Templates such as Phi 3's write this token behind the whole conversation.
        """
        end = self.variables.get("eos_token")
        return part if text.startswith(part) or not end else part.removesuffix(end)

    def _to_end_of_turn(self, text: str, start: int, end: int) -> tuple[int, int]:
        """Move `end` to the end of the token that ends the message, and before what follows it."""
        last = self.variables.get("eos_token")
        if last and text.startswith(last, end):
            return start, end + len(last)
        bare = len(text[start:end].rstrip()) + start
        if any(text.endswith(token, start, bare) for token in self.special):
            return start, bare
        for token in sorted(self.special, key=len, reverse=True):
            if text.startswith(token, end):
                return start, end + len(token)
        return start, end

    def _render(
        self, messages: Messages, tools: Any, prompt: bool, marked: bool
    ) -> tuple[str, Spans]:
        # Imported here: transformers costs seconds and is not needed to read token files.
        from transformers.utils.chat_template_utils import render_jinja_template

        shown = [{k: v for k, v in each.items() if k != "weight"} for each in messages]
        if "developer" not in self.source:
            # OpenAI's newer name of the system role, which few templates know.
            for each in shown:
                each["role"] = "system" if each["role"] == "developer" else each["role"]
        self._check_tools(shown, tools)
        source, refusals = _with_fixed_date(self.source), []
        for form in _forms(shown):
            try:
                [text], spans = render_jinja_template(
                    conversations=[form],
                    tools=tools,
                    chat_template=source,
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompt,
                    **self.variables,
                )
            except Exception as error:  # what templates raise has no common base class
                reason = " ".join(str(error).split()) or type(error).__name__
                if type(error).__name__ == "TemplateSyntaxError":
                    line = getattr(error, "lineno", "?")
                    raise DataError(
                        f"chat template: line {line}: {reason.rstrip('.')}; correct it"
                    ) from None
                refusals.append(reason)
            else:
                return text, tuple((start, end) for start, end in (spans[0] if spans else ()))
        raise TemplateError(f"the chat template refuses the conversation: {refusals[0]}")

    def _check_thoughts(self, messages: Messages, loss_on: str) -> None:
        """Refuse learned thoughts that the template would leave out. Raises `TemplateError`."""
        learned = [
            number
            for number, each in enumerate(messages)
            if each["role"] == "assistant" and each.get("weight", 1)
        ]
        for number in learned[-1:] if loss_on == "last" else learned:
            for name in _THOUGHTS:
                text = messages[number].get(name)
                given = isinstance(text, str) and text.strip()
                if given and not re.search(rf"\b{name}\b", self.source):
                    raise TemplateError(
                        f"message {number + 1} has {name}, for which the chat template has no "
                        "place; use a model or a template with thoughts, or remove them"
                    )

    def _check_tools(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Refuse what the template would leave out in silence. Raises `TemplateError`."""
        used = {
            "tools": bool(tools),
            "tool_calls": any(each.get("tool_calls") for each in messages),
        }
        for name, given in used.items():
            if given and name not in self.source:
                raise TemplateError(
                    f"the conversation has {name}, for which the chat template has no place; use "
                    "a model or a template with tools, or remove them"
                )


def _forms(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the forms of a conversation that templates expect, the usual one first.

    With calls of tools, some templates ask whether the content is null, where others must not find
    it, and some write the arguments as text, where others expect an object. DeepSeek's do both.
    """
    yield list(messages)
    if any(each.get("tool_calls") for each in messages):
        for null, text in ((True, False), (False, True), (True, True)):
            yield [_formed(each, null, text) for each in messages]


def _formed(message: dict[str, Any], null: bool, text: bool) -> dict[str, Any]:
    """Returns a message with null for missing content, or with arguments of calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    made = {"content": None} | message if null else dict(message)
    if text:
        made["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
    return made


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    return {**call, "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}


def _with_fixed_date(source: str) -> str:
    """Returns the template with `strftime_now` as a macro that writes `DATE`."""
    if "strftime_now" not in source:
        return source
    formats = {first or second for first, second in _FORMATS.findall(source)}
    cases = "".join(
        f"{{%- if format == {form!r} -%}}{DATE.strftime(form)}{{%- endif -%}}"
        for form in sorted(formats)
    )
    # Without a line end behind the macro, the text of the template stays as it is.
    return f"{{%- macro strftime_now(format) -%}}{cases}{{%- endmacro -%}}{source}"
