from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dilocox.data.conversations import Conversation, Layout, read_conversations
from dilocox.errors import DataError

CHAT, PAIRS = Layout("chat"), Layout("instruction")
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read(
    path: Path, layout: Layout = CHAT, kind: str = "jsonl"
) -> tuple[list[dict[str, Any]], int]:
    left: list[int] = []
    made = list(read_conversations(path, kind, layout, lambda: left.append(1)))
    assert all(isinstance(each, Conversation) for each in made)
    return [json.loads(each) for each in made], len(left)


def write(path: Path, *records: object) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def one(tmp_path: Path, *messages: object, **more: object) -> dict[str, Any]:
    [made], _ = read(write(tmp_path / "a.jsonl", {"messages": list(messages), **more}))
    return made


def test_all_files_give_the_same_conversations(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"messages": TALK},
        {"messages": None},
        {"messages": []},
        {"messages": [*TALK, TALK[0] | {"content": "c\ud800"}], "other": 1},
    ]
    expected = [{"messages": TALK}, {"messages": [*TALK, TALK[0] | {"content": "c\ufffd"}]}]
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert read(write(tmp_path / name, *records)) == (expected, 2)
    (tmp_path / "a.json").write_text(json.dumps(records))
    assert read(tmp_path / "a.json") == (expected, 2)
    records[3]["messages"][2] = records[3]["messages"][2] | {"content": "c\ufffd", "name": None}
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", kind="parquet") == (expected, 2)
    texts = [{"messages": json.dumps(each["messages"])} for each in records]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", kind="parquet") == (expected, 2)


def test_openais_form(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    made = one(
        tmp_path,
        {"role": "developer", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        tools=[{"type": "function"}],
    )
    assert made == {
        "messages": [
            {"role": "developer", "content": "ab"},
            {
                "role": "assistant",
                "tool_calls": [call | {"function": {"name": "add", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "1", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function"}],
    }


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", 'a.jsonl:2: field "messages" is not a list but text'),
        ([["a"]], 'a.jsonl:2: entry 1 of "messages" is a list; it must be an object'),
        ([TALK[0], {"role": "bot", "content": "a"}], 'a.jsonl:2: message 2: role "bot"; a role is'),
        ([{"from": "human", "value": "a"}], "message 1: no role; .*convert from and value to role"),
        ([{"role": "user"}], 'message 1: no "content"; give text, or tool_calls'),
        ([{"role": "user", "content": 3}], "message 1: content is a number; give text or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "message 1: a part of its content is image_url; only text",
        ),
        ([TALK[1] | {"weight": 2}], r"message 1: weight 2; give 0 \(no loss on it\) or 1"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}],
            'message 1: the arguments of the call of "f" are not a JSON object',
        ),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "a tool call without a funct"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, messages: object, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": messages})
    with pytest.raises(DataError, match=reason):
        read(path)


def test_a_file_without_messages_names_its_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"conversations": TALK, "id": 1})
    mend = "; set data.messages_field to the name of one that holds messages"
    with pytest.raises(DataError, match=rf'a.jsonl:1: no field "messages" \(.*id\){mend}'):
        read(path)
    assert read(path, Layout("chat", messages="conversations"))[0] == [{"messages": TALK}]
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf'no column "messages" \(columns: a\){mend}'):
        read(tmp_path / "a.parquet", kind="parquet")


def test_prompts_and_completions(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": None},
        {"prompt": "a", "completion": " "},
        {"completion": "b"},
    )
    assert read(path, PAIRS) == ([{"prompt": "a", "completion": "b"}], 3)
    with pytest.raises(
        DataError, match=r'field "prompt" is not text but a list; .*format = "chat"'
    ):
        read(write(path, {"prompt": TALK, "completion": "b"}), PAIRS)
    with pytest.raises(DataError, match=r'no field "prompt" .*; set data.prompt_field and data.co'):
        read(write(path, {"question": "a", "completion": "b"}), PAIRS)
    named = Layout("instruction", prompt="question")
    assert read(path, named)[0] == [{"prompt": "a", "completion": "b"}]


def test_texts_for_a_tokenizer() -> None:
    talk = [*TALK, {"role": "assistant", "tool_calls": []}]
    assert Conversation({"messages": talk}, "").texts() == "a\nb"
    assert Conversation({"prompt": "a", "completion": "b"}, "").texts() == "a\nb"
