"""The prompt of a chat: messages, written with a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.data.chat_encoding import ChatEncoder
from dilocox.data.chat_template import TemplateError
from dilocox.data.conversations import Layout
from dilocox.data.tokenizer import read_tokenizer
from dilocox.errors import CheckpointError, ConfigError, DataError


@dataclass(frozen=True)
class ChatPrompt:
    """Tokens after which the assistant's message begins."""

    ids: list[int]
    ends: list[int]
    """Tokens that end the message."""


def chat_prompt(folder: Path, prompt: str | Sequence[Mapping[str, Any]]) -> ChatPrompt:
    """Returns the prompt for the model in `folder`, with the tokens that training gives it.

    Args:
        folder: a Hugging Face folder with a tokenizer and a chat template.
        prompt: a user's message, or messages in OpenAI's form.

    Raises:
        CheckpointError: if the tokenizer cannot be loaded.
        ConfigError: if there is no template, or if it refuses the messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    try:
        parsed = Layout("chat").parse({"messages": messages}, "prompt")
        if parsed is None:
            raise ConfigError("prompt: no messages; give at least one")
        encoder = ChatEncoder(folder, read_tokenizer(folder))
        ids = encoder.prompt(json.loads(parsed)["messages"])
    except TemplateError as error:
        raise ConfigError(f"{folder}: {error}") from None
    except DataError as error:
        if str(error).startswith("prompt"):
            raise ConfigError(str(error)) from None
        raise CheckpointError(f"{error}; was the folder changed?") from None
    return ChatPrompt(ids, encoder.ends_of_turn())


def messages_in(prompt: str) -> str | list[dict[str, Any]]:
    """Returns the messages that a text holds as a JSON list, or the text if it holds none."""
    if not prompt.lstrip().startswith("["):
        return prompt
    try:
        found = json.loads(prompt)
    except (ValueError, RecursionError):
        return prompt
    messages = isinstance(found, list) and all(isinstance(each, dict) for each in found)
    return found if messages and found else prompt
