"""From records to token files with flags."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dilocox.config.data import DataSection
from dilocox.data import TokenFiles, prepare, show
from dilocox.data.croissant import croissant
from dilocox.data.example import example
from dilocox.data.flags import COUNTED
from dilocox.data.tokenizer import load_tokenizer
from dilocox.errors import DataError
from tests.data.chat_templates import CHATML, INST, PLAIN
from tests.data.chats import chat_section, talks, write_records
from tests.data.tokenizer_kinds import KINDS, save

PAIRS = [{"prompt": f"What is {n}?", "completion": f" It is {n}."} for n in range(40)]


def text_of(files: TokenFiles, document: int) -> str:
    """The text of a document, with marks around what is learned."""
    return example(files, document).split("\n", 1)[1]


def as_chatml(messages: list[dict[str, Any]]) -> str:
    texts = []
    for each in messages:
        body = each["content"] + "<|im_end|>"
        body = f"[[{body}]]" if each["role"] == "assistant" else body
        texts.append(f"<|im_start|>{each['role']}\n{body}\n")
    return "".join(texts)


def test_conversations_become_documents_with_counted_tokens(tmp_path: Path) -> None:
    records = talks()
    silent = {"messages": records[1]["messages"][:1]}
    data = chat_section(tmp_path, [*records, {"messages": None}, silent])
    files = prepare(data, tmp_path / "data", seed=0)
    files.verify()
    train, held = (files.document_count(split) for split in ("train", "validation"))
    assert (train + held, held > 0) == (40, True)
    expected = {as_chatml(each["messages"]) for each in records}
    found = {text_of(files, number) for number in range(train)}
    assert len(found) == train
    assert found < expected
    flags = files.flags("train")
    assert flags is not None
    whole = flags.gather(np.array([0]), len(flags))[0]
    assert files.content["splits"]["train"]["counted"] == np.count_nonzero(whole & COUNTED)
    about = files.content["conversations"]
    assert about["end_of_turn"][-1]["token"] == "<|im_end|>"
    assert files.records_left_out == 2
    assert "left out     1 record whose conversation is null or missing" in show(files)
    assert "left out     1 conversation of which no token is learned" in show(files)
    assert "format       chat, the tokenizer's chat template, loss on assistant" in show(files)
    assert (files.tokenizer_folder / "chat_template.jinja").read_text() == CHATML
    assert "conversations" in croissant(files.content)["description"]


def test_what_decides_the_tokens_decides_the_digest(tmp_path: Path) -> None:
    digests = set()
    for number, changes in enumerate(({}, {"loss_on": "last"}, {"loss_on": "all"})):
        data = chat_section(tmp_path, talks(), **changes)
        digests.add(prepare(data, tmp_path / str(number), seed=0).digest)
        assert prepare(data, tmp_path / str(number), seed=0).digest in digests
    assert len(digests) == 3
    with pytest.raises(DataError, match=r"other options \(loss_on 'last' instead of 'assistant'\)"):
        prepare(chat_section(tmp_path, talks()), tmp_path / "1", seed=0)


def test_a_changed_template_is_noticed(tmp_path: Path) -> None:
    data = chat_section(tmp_path, talks())
    prepare(data, tmp_path / "data", seed=0)
    (tmp_path / "template.jinja").write_text(CHATML + "\n")
    with pytest.raises(DataError, match=r"template.jinja has changed since the token .*; set"):
        prepare(data, tmp_path / "data", seed=0)
    said: list[str] = []
    prepare(data, tmp_path / "data", seed=0, changed=said.append)
    assert len(said) == 1
    (tmp_path / "template.jinja").unlink()
    prepare(data, tmp_path / "data", seed=0)


def test_text_has_none_of_the_keys(corpus: Path, files: TokenFiles) -> None:
    """Token files of text are as they were before there were conversations."""
    options = files.manifest["made_with"]["options"]
    assert not {"loss_on", "chat_template", "messages_field"} & set(options)
    assert "conversations" not in files.content


def test_prompts_and_completions_with_a_template(tmp_path: Path) -> None:
    data = chat_section(tmp_path, PAIRS, format="instruction", vocabulary_size=290)
    files = prepare(data, tmp_path / "data", seed=0)
    one = re.fullmatch(
        r"<\|im_start\|>user\nWhat is (\d+)\?<\|im_end\|>\n<\|im_start\|>assistant\n"
        r"\[\[ It is (\d+)\.<\|im_end\|>\]\]\n",
        text_of(files, 0),
    )
    assert one is not None
    assert one[1] == one[2]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_completions_without_a_template(tmp_path: Path, kind: str) -> None:
    """The prompt's tokens are those that a prompt alone has, and end-of-text is learned."""
    place = save(KINDS[kind](), tmp_path / "tokenizer")
    path = write_records(tmp_path / "a.jsonl", PAIRS)
    data = DataSection(source=str(path), format="instruction", tokenizer=str(place))
    files = prepare(data.model_copy(update={"sequence_length": 64}), tmp_path / "data", seed=0)
    encoder = load_tokenizer(str(place), tmp_path / "again")
    ends = files.document_ends("train")
    ids = files.tokens("train").gather(np.array([0]), int(ends[0]))[0].tolist()
    flags = files.flags("train")
    assert flags is not None
    counted = (flags.gather(np.array([0]), int(ends[0]))[0] & COUNTED).tolist()
    prompts = [encoder.encode([pair["prompt"]])[0] for pair in PAIRS]
    before = [id_ for id_, counts in zip(ids, counted, strict=True) if not counts]
    assert before in prompts
    assert ids[-1] == encoder.end_of_text
    assert counted[-1] == 1
    assert ids.count(encoder.end_of_text) == 1


def refusal(tmp_path: Path, records: list[dict[str, Any]], **changes: object) -> str:
    with pytest.raises(DataError) as caught:
        prepare(chat_section(tmp_path, records, **changes), tmp_path / "data", seed=0)
    assert not (tmp_path / "data").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refusals_name_the_record_and_the_mend(tmp_path: Path) -> None:
    records = talks()
    (tmp_path / "inst.jinja").write_text(INST)
    said = refusal(tmp_path, records, chat_template=str(tmp_path / "inst.jinja"))
    assert "chats.jsonl:1: the chat template refuses the conversation: Only user and" in said
    (tmp_path / "broken.jinja").write_text("{% for %}")
    said = refusal(tmp_path, records, chat_template=str(tmp_path / "broken.jinja"))
    assert f"data.chat_template {tmp_path}/broken.jinja: chat template: line 1" in said
    said = refusal(tmp_path, records, chat_template=str(tmp_path / "none.jinja"))
    assert "none.jinja: cannot be read (No such file or directory); name a file" in said
    silent = [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(9)]
    said = refusal(tmp_path, silent, vocabulary_size=259)
    assert "no token of the training conversations is learned (9 conversations without" in said
    said = refusal(tmp_path, [{"messages": []}, {"messages": None}])
    assert 'data.source: none of 2 records has a conversation: "messages" is null or' in said
    own = write_records(tmp_path / "held.jsonl", silent)
    said = refusal(tmp_path, records, vocabulary_size=259, validation_source=str(own))
    assert "data.validation_source: no token of the held-out conversations is learned" in said


def test_a_template_for_another_tokenizer_is_refused(tmp_path: Path, files: TokenFiles) -> None:
    said = refusal(tmp_path, talks(), tokenizer=str(files.tokenizer_folder))
    assert "writes <|im_start|>, which is not a token of the tokenizer and would become" in said
    (tmp_path / "plain.jinja").write_text(PLAIN)
    data = chat_section(
        tmp_path,
        talks(),
        tokenizer=str(files.tokenizer_folder),
        chat_template=str(tmp_path / "plain.jinja"),
    )
    made = prepare(data, tmp_path / "data", seed=0)
    assert "### assistant\n[[It is" in text_of(made, 0)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, files: TokenFiles) -> None:
    said = refusal(tmp_path, talks(), tokenizer=str(files.tokenizer_folder), chat_template=None)
    assert "the tokenizer has no chat template: set data.chat_template to a file" in said


def test_a_system_beside_texts_needs_a_template(tmp_path: Path, files: TokenFiles) -> None:
    pair = {"prompt": "a", "completion": "b"}
    records = [pair, pair | {"system": "c"}, pair]
    keys = {"tokenizer": str(files.tokenizer_folder), "chat_template": None}
    said = refusal(tmp_path, records, format="instruction", **keys)
    assert re.search(
        r"jsonl:2: the tokenizer has no chat template: .*\[\"system\", \"prompt\"\]$", said
    )


def test_an_example_of_text_is_learned_whole(files: TokenFiles) -> None:
    shown = example(files, 0)
    assert re.match(r"document 0 of \d+ in the training split: (\d+) tokens, \1 learned", shown)
    assert shown.endswith("<|endoftext|>]]")
    with pytest.raises(DataError, match=r"no document -1; give a number from 0 to"):
        example(files, -1)


def test_tools_reach_the_template(tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "({{ call.function.arguments.a }}){% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    arguments = json.dumps({"a": 5})
    call = {"type": "function", "id": "x", "function": {"name": "add", "arguments": arguments}}
    records = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "5", "tool_call_id": "x"},
                {"role": "assistant", "content": [{"type": "text", "text": "Five."}]},
            ],
            "tools": [tool],
        }
        for n in range(20)
    ]
    template = str(tmp_path / "tools.jinja")
    data = chat_section(tmp_path, records, chat_template=template, vocabulary_size=260)
    files = prepare(data, tmp_path / "data", seed=0)
    assert re.fullmatch(
        r"add;<\|im_start\|>user\n\d+\?<\|im_end\|><\|im_start\|>assistant\n"
        r"\[\[add\(5\)<\|im_end\|>\]\]<\|im_start\|>tool\n5<\|im_end\|>"
        r"<\|im_start\|>assistant\n\[\[Five\.<\|im_end\|>\]\]",
        text_of(files, 0),
    )
