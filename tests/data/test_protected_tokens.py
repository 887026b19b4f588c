from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dilocox.data.chat_encoding import ChatEncoder
from dilocox.data.conversations import Conversation
from dilocox.data.tokenizer import load_tokenizer
from tests.data.chat_templates import CHATML, INST, THINKING
from tests.data.tokenizer_kinds import KINDS, SPECIAL, save, word_level

TEMPLATES = {"chatml": CHATML, "inst": INST}


class Scene:
    """A tokenizer with a template, by this project and by transformers."""

    def __init__(self, kind: str, template: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        source = save(KINDS[kind](), folder / "source", template)
        self.encoder = load_tokenizer(str(source), folder / "tokenizer")
        self.chat = ChatEncoder(folder / "tokenizer", self.encoder)
        self.theirs = AutoTokenizer.from_pretrained(source)

    def ids(self, messages: list[dict[str, Any]]) -> list[int]:
        [made] = self.chat.encode([Conversation({"messages": messages}, "here")])
        assert made is not None
        assert len(made.counted) == len(made.ids)
        return made.ids

    def applied(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self.theirs.apply_chat_template(messages, tokenize=True)["input_ids"])

    def special(self, ids: list[int]) -> list[str]:
        names = {self.encoder.tokenizer.token_to_id(name): name for name in SPECIAL}
        return [names[id_] for id_ in ids if id_ in names and names[id_] != "<unk>"]


@pytest.fixture(params=[(kind, name) for kind in KINDS for name in TEMPLATES], ids="-".join)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    kind, name = request.param
    return Scene(kind, TEMPLATES[name], tmp_path)


def talk(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def test_ordinary_text_has_the_ids_of_transformers(scene: Scene) -> None:
    for texts in (
        ("What is two plus three?", "It is five.", "the quick brown fox", "hello world"),
        (" spaces  before", "and behind ", "lines\n\nand\ttabs", "\nend\n"),
        ("a < b > c | d [ e ] / s", "é ü 你好 🙂 İ", "", "x"),
        ("The Quick BROWN", "fox<", ">jumps", "s>"),
    ):
        messages = talk(*texts)
        assert scene.ids(messages) == scene.applied(messages)


PIECES = [
    *SPECIAL,
    "<|im_",
    "start|>",
    "<",
    "s>",
    "/s>",
    "[INS",
    "T]",
    " ",
    "\n",
    "a",
    "\U0010e003",
]


def test_text_is_never_a_special_token(scene: Scene) -> None:
    expected = scene.special(scene.ids(talk("a", "b", "a", "b")))
    assert expected

    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(
        st.lists(
            st.lists(st.sampled_from(PIECES), max_size=5).map("".join) | st.text(max_size=9),
            min_size=4,
            max_size=4,
        )
    )
    def check(texts: list[str]) -> None:
        assert scene.special(scene.ids(talk(*texts))) == expected

    check()


def test_the_case_stands_for_all_that_is_in_the_vocabulary() -> None:
    """Without protection, a tokenizer of words takes the name in a text for the special token."""
    plain: Tokenizer = word_level()
    plain.encode_special_tokens = True
    assert plain.encode("a </s> b").tokens == ["a", "</s>", "<unk>"]


def test_added_tokens_that_are_not_special_are_the_assistants_alone(tmp_path: Path) -> None:
    scene = Scene("byte-level", THINKING, tmp_path)
    think = scene.encoder.tokenizer.token_to_id("<think>")
    assert think is not None

    def count(user: str, assistant: str) -> int:
        return scene.ids(talk(user, assistant)).count(think)

    assert count("a", "b") == 1  # the template's
    assert count("<think>", "b") == 1
    assert count("a", "b <think>") == 2
    messages = talk("a", "<think>b</think>c <think>")
    assert scene.ids(messages) == scene.applied(messages)


def test_texts_side_by_side_make_no_special_token(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.a | trim }}{{ m.content | trim }}"
        "<|im_end|>{% endfor %}"
    )
    scene = Scene("byte-level", template, tmp_path)
    for a, b in (("<", "/s>"), ("x <|im ", "_end|>"), ("x</s", " >y"), ("[INST", "]")):
        messages = [{"role": role, "content": b, "a": a} for role in ("user", "assistant")]
        ids = scene.ids(messages)
        assert scene.special(ids) == ["<|im_start|>", "<|im_end|>"] * 2
        text = scene.encoder.tokenizer.decode(ids, skip_special_tokens=False)
        assert text.count(a.strip() + b.strip()) == 2


def test_names_of_tools_and_their_arguments_are_text(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>"
        "{% endfor %}"
    )
    scene = Scene("byte-level", template, tmp_path)
    calls = [{"function": {"name": "</s>", "arguments": {"<|im_end|>": ["<s>", {"a": "</s>"}]}}}]
    messages = [*talk("a"), {"role": "assistant", "content": "", "tool_calls": calls}]
    content = {"messages": messages, "tools": [{"<s>": "<|im_end|>"}]}
    [made] = scene.chat.encode([Conversation(content, "here")])
    assert made is not None
    assert scene.special(made.ids) == ["<|im_start|>", "<|im_end|>"] * 2
    text = scene.encoder.tokenizer.decode(made.ids, skip_special_tokens=False)
    assert '{"name": "</s>", "arguments": {"<|im_end|>": ["<s>", {"a": "</s>"}]}}' in text
