"""One answer from the pieces of a stream, as OpenAI's protocol has both. Pure."""

from __future__ import annotations

import json
from typing import Any

from dilocox.tools.serving.asked import CHAT

_DATA = b"data:"


def piece_in(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of a stream. None: the line has none."""
    text = line.strip()
    if not text.startswith(_DATA):
        return None
    try:
        found = json.loads(text[len(_DATA) :])
    except ValueError:
        return None  # the end mark of a stream
    return found if isinstance(found, dict) else None


class Answer:
    """Joins the pieces of one answer."""

    def __init__(self, path: str) -> None:
        self._chat = path == CHAT
        self._head: dict[str, Any] = {}
        self._message: dict[str, Any] = {}
        self._reason: str | None = None
        self._usage: Any = None
        self.error: str | None = None
        """Why the engine could not go on."""

    def take(self, piece: dict[str, Any]) -> None:
        """Add a piece: texts are joined, and lists, such as calls of tools, too."""
        if "error" in piece:
            self.error = str(piece["error"])
            return
        self._head = {
            key: piece.get(key, self._head.get(key)) for key in ("id", "created", "model")
        }
        self._usage = piece.get("usage") or self._usage
        for choice in piece.get("choices", [])[:1]:
            self._reason = choice.get("finish_reason") or self._reason
            said = choice.get("delta") or {}
            for key, value in (said if self._chat else {"text": choice.get("text")}).items():
                if value is None:
                    continue
                before = self._message.get(key)
                joins = key != "role" and before is not None and isinstance(value, str | list)
                self._message[key] = before + value if joins else value

    def whole(self) -> dict[str, Any]:
        """Return the answer in the form for a request without `stream`."""
        kind = "chat.completion" if self._chat else "text_completion"
        if self._chat:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": ""} | self._message}
        else:
            said = {"text": ""} | self._message
        choice = {"index": 0, **said, "finish_reason": self._reason}
        return {**self._head, "object": kind, "choices": [choice], "usage": self._usage}
