"""Small files of conversations for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dilocox.config.data import DataSection
from tests.data.chat_templates import CHATML


def talks(count: int = 40) -> list[dict[str, Any]]:
    """Records of format `chat`: one or two turns, some begun by a system message."""
    records = []
    for number in range(count):
        messages = [
            {"role": "user", "content": f"What is {number} plus one?"},
            {"role": "assistant", "content": f"It is {number + 1}. " + "That is sure. " * 3},
        ]
        if number % 3 == 0:
            messages = [{"role": "system", "content": "Be sure."}, *messages]
        if number % 2 == 0:
            messages += [
                {"role": "user", "content": "Really?"},
                {"role": "assistant", "content": f"Yes, {number + 1}."},
            ]
        records.append({"messages": messages})
    return records


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path


def chat_section(folder: Path, records: list[dict[str, Any]], **changes: object) -> DataSection:
    """`[data]` for conversations with a trained tokenizer, whose files are in `folder`."""
    (folder / "template.jinja").write_text(CHATML, encoding="utf-8")
    given: dict[str, object] = {
        "source": str(write_records(folder / "chats.jsonl", records)),
        "format": "chat",
        "chat_template": str(folder / "template.jinja"),
        "vocabulary_size": 300,
        "sequence_length": 128,
        "validation_fraction": 0.1,
    }
    return DataSection.model_validate(given | changes)
