from __future__ import annotations

import datetime
import gzip
import json
import math
from decimal import Decimal
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
        ([{"from": "tool", "value": "a"}], 'message 1: from is "tool"; it is one of human, user,'),
        ([{"from": None, "value": "a"}], "message 1: from is null; it is one of human, user,"),
        ([{"from": "gpt"}], 'message 1: no "content"; give text, or tool_calls'),
        ([{"from": "gpt", "value": 3}], "message 1: content is a number; give text or a list"),
        ([{"from": "gpt", "content": "a"}], "message 1: content beside from; write role and cont"),
        ([TALK[1] | {"train": "no"}], r"message 1: train must be true or false \(no loss on it\)"),
        ([TALK[1] | {"train": True, "weight": 1}], "message 1: train must be .*, without weight"),
        ([{"role": "user"}], 'message 1: no "content"; give text, or tool_calls'),
        ([{"role": "user", "content": 3}], "message 1: content is a number; give text or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "message 1: part 1 of its content is of type image_url; only text",
        ),
        ([None], 'entry 1 of "messages" is null; it must be an object'),
        (
            [{"role": "user", "content": ["a", "b"]}],
            'message 1: part 1 of its content is text; write a part as {"type": "text", "text": ',
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            'message 1: part 1 of its content has no text in "text"; give text, or remove',
        ),
        (
            [TALK[1] | {"function_call": {"name": "f", "arguments": "{}"}}],
            "message 1: function_call is the former form of tool_calls .*; write the call as tool",
        ),
        ([{"role": "function", "content": "3"}], 'role "function"; .*; results of calls have the'),
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
    both = r'field "prompt" is not text but a list; .* both text, or both lists of messages'
    with pytest.raises(DataError, match=both):
        read(write(path, {"prompt": TALK, "completion": "b"}), PAIRS)
    with pytest.raises(DataError, match=r'no field "prompt" .*; set data.prompt_field and data.co'):
        read(write(path, {"question": "a", "completion": "b"}), PAIRS)
    named = Layout("instruction", prompt="question")
    assert read(path, named)[0] == [{"prompt": "a", "completion": "b"}]


def test_texts_for_a_tokenizer() -> None:
    talk = [*TALK, {"role": "assistant", "tool_calls": []}]
    assert Conversation({"messages": talk}, "").texts() == "a\nb"
    assert Conversation({"prompt": "a", "completion": "b"}, "").texts() == "a\nb"


def called(name: str, arguments: object, **more: object) -> dict[str, Any]:
    """A message of the assistant that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def tool(name: str, **properties: object) -> dict[str, Any]:
    """The description of a tool."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CALLS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "Is it warm?"},
            called("weather", {"city": "Paris", "days": [{"from": 1}, {"to": 2}]}),
        ],
        "tools": [tool("weather", city={"type": "string"}, days={"type": "array"})],
    },
    {
        "messages": [TALK[0], called("clock", {"zone": "UTC", "at": ["x", None]}, thought="hm")],
        "tools": [tool("clock", zone={"type": "string", "enum": ["UTC", None]})],
    },
    {"messages": [TALK[0], called("now", {})], "tools": [tool("now")]},
]


def test_arrow_adds_no_keys_to_calls_and_tools(tmp_path: Path) -> None:
    """Arrow gives the arguments of all calls the same keys, and null where there was none."""
    table = pa.Table.from_pylist(CALLS)
    added = table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert added["zone"] is None
    pq.write_table(table, tmp_path / "a.parquet")
    path = write(tmp_path / "a.jsonl", *CALLS)
    assert read(tmp_path / "a.parquet", kind="parquet") == read(path) == (CALLS, 0)
    pairs = [
        {"chosen": each["messages"], "rejected": TALK, "tools": each["tools"]} for each in CALLS[1:]
    ]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "b.parquet")
    layout = Layout("preference")
    made = read(write(tmp_path / "b.jsonl", *pairs), layout)
    assert read(tmp_path / "b.parquet", layout, "parquet") == made


def test_nulls_that_json_gives_are_kept(tmp_path: Path) -> None:
    schema = tool("clock", zone={"default": None})
    messages = [TALK[0], called("clock", {"zone": None})]
    assert one(tmp_path, *messages, tools=[schema]) == {"messages": messages, "tools": [schema]}
    as_text = [TALK[0], called("clock", '{"zone": null}')]
    table = pa.Table.from_pylist([{"messages": as_text, "tools": json.dumps([schema])}])
    pq.write_table(table, tmp_path / "a.parquet")
    [made], _ = read(tmp_path / "a.parquet", kind="parquet")
    assert made == {"messages": messages, "tools": [schema]}


def test_arrow_values_become_those_of_json(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 7, 26, 12, 30, tzinfo=datetime.UTC)
    arguments = {"day": day.date(), "hour": day.time(), "price": Decimal("1.50"), "n": Decimal(3)}
    messages = [
        TALK[0] | {"sent": day, "content": b"a"},
        called("pay", arguments, parts=[{"text": "x", "type": None}]),
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    [made], _ = read(tmp_path / "a.parquet", kind="parquet")
    written = {"day": "2024-07-26", "hour": "12:30:00", "price": 1.5, "n": 3}
    assert made["messages"] == [
        TALK[0] | {"sent": "2024-07-26T12:30:00+00:00", "content": "a"},
        called("pay", written, parts=[{"text": "x"}]),
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (datetime.timedelta(1), '"x" is of type timedelta, which JSON cannot hold; give text or'),
        (b"\xff", '"x" is of type bytes, which JSON cannot hold; give text or a number, or remove'),
        ({"y": [1.0, math.nan]}, '"x", "y", entry 2 is nan, which JSON cannot hold; give a finite'),
        (-math.inf, '"x" is -inf, which JSON cannot hold; give a finite number, or remove the key'),
    ],
)
def test_what_json_cannot_hold_is_named(tmp_path: Path, value: object, reason: str) -> None:
    records = [{"messages": TALK}, {"messages": [TALK[0], TALK[1] | {"x": value}]}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.parquet", kind="parquet")
    place = f"{tmp_path / 'a.parquet'}:row 2"
    assert str(caught.value).startswith(f'{place}: "messages", entry 2, {reason}')
    if "of type" in reason:
        return
    with pytest.raises(DataError) as caught:
        read(write(tmp_path / "a.jsonl", *records))
    assert str(caught.value).startswith(f'{tmp_path}/a.jsonl:2: "messages", entry 2, {reason}')
    with pytest.raises(DataError, match=r'^here: "tools", entry 1, "x"'):
        CHAT.parse({"messages": TALK, "tools": [{"x": value}]}, "here")


def test_keys_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    """JSON readers take the second value, so that the first one would be lost in silence."""
    path = tmp_path / "a.jsonl"
    good = json.dumps({"messages": TALK})
    double = '{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
    path.write_text(f"{good}\n{double}\n")
    twice = 'key "content" is there twice in one object; remove one of the two'
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {twice}"):
        read(path)
    (tmp_path / "a.json").write_text(f"[{good}, {double}]")
    with pytest.raises(DataError, match=rf"a\.json:record 2: {twice}"):
        read(tmp_path / "a.json")
    with pytest.raises(DataError, match=rf'field "messages": {twice}'):
        CHAT.parse({"messages": double[13:-1]}, "here")
    call = called("f", '{"a": 1, "a": 2}')
    with pytest.raises(DataError, match=r'of the call of "f": key "a" is there twice'):
        one(tmp_path, TALK[0], call)


def test_fields_of_other_libraries_are_not_left_out_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read(write(path, {"messages": TALK, "functions": "[]"})) == ([{"messages": TALK}], 0)
    with pytest.raises(DataError, match=r'field "functions" is not read, .*write .* as tools'):
        read(write(path, {"messages": TALK, "functions": [{"name": "f"}]}))
    alpaca = Layout("instruction", prompt="instruction", completion="output")
    record = {"instruction": "a", "input": "", "output": "b"}
    assert read(write(path, record), alpaca)[0] == [{"prompt": "a", "completion": "b"}]
    with pytest.raises(DataError, match=r'field "input" is not read, .*; set data.prompt_field = '):
        read(write(path, record, record | {"input": "c"}), alpaca)
    with pytest.raises(DataError, match=r'"context" is not read, .*"instruction", "context"\], or'):
        read(write(path, record | {"context": "c"}), alpaca)
    with pytest.raises(DataError, match=r'a.jsonl:1: field "history" is not read'):
        read(write(path, {"prompt": "a", "completion": "b", "history": [["c", "d"]]}), PAIRS)
    named = Layout("instruction", prompt="system", completion="output")
    assert read(write(path, {"system": "a", "output": "b"}), named)[0] == [
        {"prompt": "a", "completion": "b"}
    ]


def test_a_prompt_of_several_fields(tmp_path: Path) -> None:
    """As Alpaca and Dolly have them."""
    layout = Layout("instruction", prompt="instruction", completion="output", behind=("input", "x"))
    records: list[dict[str, Any]] = [
        {"instruction": "a", "input": "b", "output": "c", "x": "d"},
        {"instruction": "a", "input": " ", "output": "c", "x": None},
        {"instruction": "a", "input": None, "output": "c", "x": "d"},
        {"instruction": None, "input": None, "output": "c", "x": ""},
    ]
    records.append({"instruction": " ", "input": "b", "output": "c", "x": None})
    prompts = ("a\n\nb\n\nd", "a", "a\n\nd", "b")
    expected = [{"prompt": each, "completion": "c"} for each in prompts]
    path = write(tmp_path / "a.jsonl", *records)
    assert read(path, layout) == (expected, 1)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", layout, "parquet") == (expected, 1)
    few = write(path, {"instruction": "a", "output": "c"}, records[0])
    assert read(few, layout)[0][0] == {"prompt": "a", "completion": "c"}
    for other in (3, [TALK[0]]):
        with pytest.raises(DataError, match=r'field "input" is not text but a .*; the fields of'):
            read(write(path, records[0] | {"input": other}), layout)
    misspelt = r'no record has the field "x" of data.prompt_field \(fields: instruction, output, '
    with pytest.raises(DataError, match=misspelt):
        read(write(path, {"instruction": "a", "output": "c", "input": "b"}), layout)


def test_messages_in_text_are_messages(tmp_path: Path) -> None:
    """Tables hold lists of messages as JSON text."""
    path, [prompt, completion] = tmp_path / "a.jsonl", (json.dumps([each]) for each in TALK)
    record = {"prompt": f" {prompt}", "completion": completion.replace("[{", "[\n {")}
    assert read(write(path, record), PAIRS) == ([{"messages": TALK}], 0)
    speaker = json.dumps([{"from": "gpt", "value": "b"}])
    assert read(write(path, record | {"completion": speaker}), PAIRS)[0] == [{"messages": TALK}]
    with pytest.raises(DataError, match=r'field "completion" holds messages as Python writes the'):
        read(write(path, record | {"completion": str([TALK[1]])}), PAIRS)
    double = '[{"role": "assistant", "content": "a", "content": "b"}]'
    with pytest.raises(DataError, match=r'field "completion": key "content" is there twice'):
        read(write(path, record | {"completion": double}), PAIRS)
    as_answer = {"prompt": "a", "completion": '[{"name": "f"}]'}
    assert read(write(path, as_answer), PAIRS)[0] == [as_answer]


def test_a_system_beside_the_messages_comes_first(tmp_path: Path) -> None:
    path, system = tmp_path / "a.jsonl", {"role": "system", "content": "c"}
    records: list[dict[str, Any]] = [
        {"messages": TALK, "system": None},
        {"messages": TALK, "system": " "},
        {"messages": TALK, "system": "c"},
        {"messages": [system, *TALK], "system": "c"},
        {"messages": [], "system": "c"},
    ]
    expected = [{"messages": [*before, *TALK]} for before in ([], [], [system], [system])]
    assert read(write(path, *records)) == (expected, 1)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.pq")
    assert read(tmp_path / "a.pq", kind="parquet") == (expected, 1)
    parts = [{"type": "text", "text": "c"}]
    assert read(write(path, {"messages": TALK, "system": parts}))[0] == [expected[2]]
    with pytest.raises(DataError, match=r'a.jsonl:1: field "system", which .* content is an obj'):
        read(write(path, {"messages": TALK, "system": {"content": "c"}}))
    differs = 'a.jsonl:1: field "system" differs from the first message, whose role is system'
    with pytest.raises(DataError, match=differs):
        read(write(path, {"messages": [system, *TALK], "system": "d"}))
    # With a prompt and a completion, too: Orca's records have texts.
    pair = {"prompt": "a", "completion": "b"}
    lists = {"prompt": TALK[:1], "completion": TALK[1:]}
    for record in (pair, lists):
        assert read(write(path, record | {"system": "c"}), PAIRS) == ([expected[2]], 0)
        pq.write_table(pa.Table.from_pylist([record | {"system": "c"}]), tmp_path / "b.pq")
        assert read(tmp_path / "b.pq", PAIRS, "parquet") == ([expected[2]], 0)
    assert read(write(path, pair | {"system": ""}), PAIRS)[0] == [pair]
    joined = Layout("instruction", prompt="system", behind=("prompt",))
    assert read(write(path, pair | {"system": "c"}), joined)[0] == [pair | {"prompt": "c\n\na"}]
    named = Layout("chat", messages="system")
    assert read(write(path, {"system": TALK}), named) == ([{"messages": TALK}], 0)


def test_messages_of_other_libraries(tmp_path: Path) -> None:
    """ShareGPT has `from` and `value`; Axolotl's `train` is as `weight`."""
    talk: list[dict[str, Any]] = [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b", "train": False},
        {"from": "user", "value": "a"},
        {"from": "assistant", "value": "b", "train": True},
    ]
    expected = [
        {"role": "system", "content": "Be short."},
        TALK[0],
        TALK[1] | {"weight": 0},
        *TALK,
    ]
    assert one(tmp_path, *talk) == {"messages": expected}
    pq.write_table(pa.Table.from_pylist([{"messages": talk}]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", kind="parquet") == ([{"messages": expected}], 0)
    both = {"from": None, "value": None, **TALK[0]}
    assert one(tmp_path, both, TALK[1]) == {"messages": TALK}


def test_prompts_and_completions_as_messages(tmp_path: Path) -> None:
    """As TRL has them; answers in the prompt are not learned."""
    tools = [tool("f", a={"type": "string"})]
    record = {"prompt": [*TALK, TALK[0]], "completion": [TALK[1]], "tools": tools}
    expected = {"messages": [TALK[0], TALK[1] | {"weight": 0}, *TALK], "tools": tools}
    empty: dict[str, Any] = {"prompt": TALK, "completion": []}
    path = write(tmp_path / "a.jsonl", record, empty)
    assert read(path, PAIRS) == ([expected], 1)
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    [made], _ = read(tmp_path / "a.parquet", PAIRS, "parquet")
    assert made["messages"] == expected["messages"]
