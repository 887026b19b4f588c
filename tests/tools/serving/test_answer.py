"""Answers from the pieces of their streams."""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.tools.serving.answer import Answer, piece_in


def of_chat(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"id": "7", "created": 1, "model": "m"}
    return {**head, "choices": [{"index": 0, "delta": delta, **more}]}


def test_the_pieces_of_a_chat_make_one_message() -> None:
    made = Answer("/v1/chat/completions")
    for delta in (
        {"role": "assistant"},
        {"reasoning_content": "2 + 2"},
        {"content": "it is "},
        {"content": "4"},
        {"tool_calls": [{"id": "a"}]},
        {"tool_calls": [{"id": "b"}]},
    ):
        made.take(of_chat(delta))
    made.take(of_chat({}, finish_reason="stop") | {"usage": {"total_tokens": 9}})
    assert made.whole() == {
        "id": "7",
        "created": 1,
        "model": "m",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "it is 4",
                    "reasoning_content": "2 + 2",
                    "tool_calls": [{"id": "a"}, {"id": "b"}],
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {"total_tokens": 9},
    }


def test_an_answer_without_words_is_an_empty_text() -> None:
    assert Answer("/v1/completions").whole()["choices"][0]["text"] == ""
    said = Answer("/v1/chat/completions").whole()["choices"][0]["message"]
    assert said == {"role": "assistant", "content": ""}


def test_an_error_in_the_stream_is_kept() -> None:
    made = Answer("/v1/completions")
    made.take({"error": "out of memory"})
    assert made.error == "out of memory"


@pytest.mark.parametrize("line", [b"", b"\n", b": comment\n", b"data: [DONE]\n", b"data: {\n"])
def test_other_lines_of_a_stream_have_no_piece(line: bytes) -> None:
    assert piece_in(line) is None


def test_a_line_of_data_has_a_piece() -> None:
    assert piece_in(b'data: {"id": "1"}\r\n') == {"id": "1"}
