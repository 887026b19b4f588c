"""Makes tokens of conversations: chat template, protected tokenizer, and what is learned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dilocox.config.data import DataSection
from dilocox.data.chat_template import ChatTemplate, Spans, TemplateError, marks_of
from dilocox.data.conversations import Conversation
from dilocox.data.messages import turns_of
from dilocox.data.protected_tokens import Encoded, Masks, ProtectedTokenizer
from dilocox.data.tokenizer import Encoder
from dilocox.errors import DataError
from dilocox.utils.template_files import TEMPLATE_FILE, TEMPLATES_FOLDER

PROBE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"})
"""Conversation by which a template's tokens are found."""

_NO_TEMPLATE = (
    "the tokenizer has no chat template: set data.chat_template to a file with one, such as the "
    "chat_template.jinja of the model's instruct version"
)

_JOINED = (
    '; a system beside prompts of text needs none with data.prompt_field = ["system", "prompt"]'
)


class ChatEncoder:
    """Encodes conversations with the tokenizer and the chat template in a folder.

    A conversation of format `instruction` becomes a user's message and an assistant's message. If
    there is no template, it is begin-of-text, prompt, completion and end-of-text.
    """

    def __init__(self, folder: Path, encoder: Encoder, loss_on: str = "assistant") -> None:
        """Read tokenizer and template from `folder`.

        Args:
            folder: a tokenizer's folder, with `chat_template.jinja` if there is a template.
            encoder: the tokenizer for text, see `load_tokenizer`.
            loss_on: tokens that are learned, see `data.loss_on`.

        Raises:
            DataError: if the tokenizer cannot be protected, see `ProtectedTokenizer`.
        """
        # Imported here: transformers costs seconds and is not needed to read token files.
        from transformers import AutoTokenizer

        self._encoder = encoder
        self._loss_on = loss_on
        self.without_labels = 0
        """Number of conversations that were left out because no token of them is learned."""
        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        added = encoder.tokenizer.get_added_tokens_decoder().values()
        special = frozenset(each.content for each in added if each.special)
        written = _sources(own.chat_template)
        variables = {
            key: value for key, value in own.special_tokens_map.items() if isinstance(value, str)
        }
        self.templates = {
            name: ChatTemplate(source, variables, special) for name, source in written.items()
        }
        # What a template writes itself means something, though its tokens may not be special.
        named = {
            each.content
            for each in added
            if not (each.content.isspace() or each.content.isalnum())
            and any(each.content in source for source in written.values())
        }
        self._tokenizer = ProtectedTokenizer(encoder.tokenizer, sorted(special | named))
        # The model writes such tokens itself, as in <think>, so they are tokens in its messages.
        self._assistants, self._others = Masks(special), Masks(special | named)

    def check_template(self, given: str | None, needed: bool) -> None:
        """Raise `DataError` if there is no template, or one with tokens of another tokenizer.

        Args:
            given: `data.chat_template`. Only such a template is checked for tokens, since the marks
                of a tokenizer's own template may be text.
            needed: a template is needed.
        """
        if needed and not self.templates:
            raise DataError(f"data.tokenizer: {_NO_TEMPLATE}")
        if given is None:
            return
        template = self.templates["default"]
        try:
            text = template.render(PROBE)
        except TemplateError:
            return
        except DataError as error:  # the template cannot be read as Jinja
            raise DataError(f"data.chat_template {given}: {error}") from None
        unknown = [
            mark for mark in marks_of(text) if self._encoder.tokenizer.token_to_id(mark) is None
        ]
        if unknown:
            [ids] = self._encoder.encode([unknown[0]])
            raise DataError(
                f"data.chat_template {given}: writes {unknown[0]}, which is not a token of the "
                f"tokenizer and would become {len(ids)} tokens; use a template for this tokenizer, "
                "or write marks of another form, such as ### User"
            )

    def template(self, tools: Any = None) -> ChatTemplate | None:
        """Returns the template for a conversation with `tools`, or None if there is none."""
        chosen = self.templates.get("tool_use") if tools else None
        return chosen or self.templates.get("default")

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | None]:
        """Returns the tokens of each conversation, or None for one of which nothing is learned.

        Raises `DataError`, which names the record, if the template refuses a conversation.
        """
        contents = [json.loads(conversation) for conversation in conversations]
        if not self.templates:
            for content, conversation in zip(contents, conversations, strict=True):
                if "prompt" not in content:
                    led = content["messages"][0]["role"] == "system"
                    raise DataError(f"{conversation.where}: {_NO_TEMPLATE}{_JOINED if led else ''}")
            encoded = self._completions(contents)
        else:
            rendered: list[str] = []
            spans: list[Spans] = []
            tables: list[dict[str, str]] = []
            for content, conversation in zip(contents, conversations, strict=True):
                tables.append({})
                try:
                    text, learned = self._render(content, tables[-1])
                except TemplateError as error:
                    raise DataError(f"{conversation.where}: {error}") from None
                rendered.append(text)
                spans.append(learned)
            encoded = self._tokenizer.encode(rendered, spans, tables)
        made = [each if any(each.counted) else None for each in encoded]
        self.without_labels += made.count(None)
        return made

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Returns the tokens after which the assistant's next message begins.

        Raises `TemplateError` if there is no template or the template refuses the messages.
        """
        template = self.template(tools)
        if template is None:
            raise TemplateError(_NO_TEMPLATE)
        table: dict[str, str] = {}
        text = template.render(*self._masked(messages, tools, table), prompt=True)
        [encoded] = self._tokenizer.encode([text], [()], [table])
        return encoded.ids

    def ends_of_turn(self) -> list[int]:
        """Returns the ids of the tokens that end a message of the assistant, end-of-text included.

        The token is found in a small conversation; a template that refuses it gives end-of-text.
        """
        ends = [self._encoder.end_of_text]
        for template in self.templates.values():
            try:
                text, spans = template.learned(PROBE, None, "assistant")
            except TemplateError:
                continue
            [made] = self._tokenizer.encode([text], [spans], [{}])
            last = [id_ for id_, counted in zip(made.ids, made.counted, strict=True) if counted]
            token = self._encoder.tokenizer.id_to_token(last[-1]) if last else None
            if token in template.special and last[-1] not in ends:
                ends.append(last[-1])
        return ends

    def _render(self, content: dict[str, Any], table: dict[str, str]) -> tuple[str, Spans]:
        messages = turns_of(content)
        template = self.template(content.get("tools"))
        if template is None:
            raise TemplateError(_NO_TEMPLATE)
        if self._loss_on != "all" and all(each["role"] != "assistant" for each in messages):
            return "", ()
        masked = self._masked(messages, content.get("tools"), table)
        return template.learned(*masked, self._loss_on)

    def _masked(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, table: dict[str, str]
    ) -> tuple[list[dict[str, Any]], Any]:
        """Returns messages and tools with masked texts. Roles are not masked."""
        masked = []
        for each in messages:
            masks = self._assistants if each["role"] == "assistant" else self._others
            rest = {key: value for key, value in each.items() if key != "role"}
            masked.append({"role": each["role"], **masks.mask(rest, table)})
        return masked, self._others.mask(tools, table)

    def _completions(self, contents: Sequence[Mapping[str, str]]) -> list[Encoded]:
        """Returns begin-of-text, prompt, completion and end-of-text, of which the latter two count.

        The prompt's tokens are those of the prompt alone, as when text is generated. If a token
        would reach from the prompt into the completion, the completion is encoded on its own.
        """
        prompts = [content["prompt"] for content in contents]
        completions = [content["completion"] for content in contents]
        both = [first + second for first, second in zip(prompts, completions, strict=True)]
        parts = zip(*map(self._tokenizer.encode_text, (prompts, completions, both)), strict=True)
        begin, end = list(self._encoder.begin_of_text), self._encoder.end_of_text
        made = []
        for prompt, completion, whole in parts:
            joined = whole[: len(prompt)] == prompt
            learned = [*(whole[len(prompt) :] if joined else completion), end]
            before = [*begin, *prompt]
            counted = [self._loss_on == "all"] * len(before) + [True] * len(learned)
            made.append(Encoded(before + learned, counted))
        return made


def _sources(written: str | Mapping[str, str] | None) -> dict[str, str]:
    """Returns the templates of a tokenizer by name."""
    if written is None:
        return {}
    return {"default": written} if isinstance(written, str) else dict(written)


def chosen_template(data: DataSection) -> str | None:
    """Returns the text of the file `data.chat_template`, or None if the key is not set.

    Raises `DataError` if the file cannot be read.
    """
    if data.chat_template is None:
        return None
    named = f"data.chat_template {data.chat_template}"
    mend = "name a file with a Jinja template"
    try:
        text = Path(data.chat_template).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{named}: cannot be read ({reason}); {mend}") from None
    if not text.strip():
        raise DataError(f"{named}: is empty; {mend}")
    return text


def write_template(folder: Path, template: str) -> None:
    """Make `template` the only chat template of the tokenizer in `folder`."""
    (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    shutil.rmtree(folder / TEMPLATES_FOLDER, ignore_errors=True)
    config = folder / "tokenizer_config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    if content.pop("chat_template", None) is not None:
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_same_template(
    data: DataSection, folder: Path, changed: Callable[[str], None] | None
) -> None:
    """Compare the file `data.chat_template` with the template in a tokenizer's folder.

    Args:
        data: `[data]` of the run file.
        folder: the tokenizer's folder in token files that exist.
        changed: is called with a message if the file has changed. If None, a change raises.

    Raises:
        DataError: if the file has changed and `changed` is None.
    """
    if data.chat_template is None or not Path(data.chat_template).expanduser().is_file():
        return
    if chosen_template(data) == (folder / TEMPLATE_FILE).read_text(encoding="utf-8"):
        return
    named = f"data.chat_template {data.chat_template} has changed since the token files in"
    if changed is None:
        raise DataError(
            f"{named} {folder.parent} were made; set data.folder to another folder or delete this "
            "one"
        )
    changed(f"{named} {folder.parent} were made; the run goes on with the former template")
