"""What a client may ask: the bodies of requests, checked before the engine sees them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, COMPLETION)
_LENGTHS = ("max_tokens", "max_completion_tokens")
USUAL_TOKENS = 1024
"""Most tokens of an answer if the request does not say."""
_SETTINGS = "chat_template_kwargs"
_SWITCH = "enable_thinking"


@dataclass(frozen=True)
class Served:
    """The model that is served."""

    name: str
    tokens: int
    """Most tokens that the model can read and write."""
    chats: bool
    """Whether the model has a chat template."""
    created: int
    """Unix time of the model, in seconds."""


class RefusedError(Exception):
    """The request cannot be answered. `status`: of HTTP."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def checked(path: str, asked: object, served: Served) -> dict[str, Any]:
    """Return the body for the engine. It always asks for a stream.

    The engine would take settings that no stranger may choose: a template that it renders without
    a limit, and a whole configuration of generation. Raises `RefusedError`.
    """
    if not isinstance(asked, dict):
        raise RefusedError(400, "the request is no JSON object")
    if asked.get("model", served.name) != served.name:
        raise unknown_model(asked["model"], served)
    if "generation_config" in asked:
        raise RefusedError(400, "generation_config: give temperature, top_p, seed and stop instead")
    if path == CHAT:
        if not served.chats:
            raise RefusedError(
                400, f"the model has no chat template; ask {COMPLETION} to continue a text"
            )
        _check_messages(asked.get("messages"))
        _check_settings(asked.get(_SETTINGS, {}))
    elif not isinstance(asked.get("prompt", ""), str):
        raise RefusedError(400, "prompt: give one text")
    return {**asked, "model": served.name, "stream": True, **_length(asked, served)}


def unknown_model(name: object, served: Served) -> RefusedError:
    """Return the refusal of a model that is not served."""
    return RefusedError(404, f"no model {name!r} here; this server has {served.name!r}")


def _check_messages(messages: object) -> None:
    """The engine itself fails without a reason for anything but objects with a role."""
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "messages: give a list of one message or more")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RefusedError(400, f"messages[{number}]: give an object with a role, such as user")


def _check_settings(settings: object) -> None:
    known = isinstance(settings, dict) and all(
        key == _SWITCH and isinstance(value, bool) for key, value in settings.items()
    )
    if not known:
        raise RefusedError(400, f"{_SETTINGS}: only {_SWITCH} can be set, to true or false")


def _length(asked: Mapping[str, Any], served: Served) -> dict[str, int]:
    given = [key for key in _LENGTHS if asked.get(key) is not None]
    for key in given:
        value = asked[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= served.tokens:
            raise RefusedError(400, f"{key}: give a number from 1 to {served.tokens:,}")
    return {} if given else {"max_tokens": min(USUAL_TOKENS, served.tokens)}
