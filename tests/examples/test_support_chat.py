"""The example about support: conversations, held-out questions, and what counts as right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.example_scripts import script

pytestmark = pytest.mark.waits

make_data, ask = script("support-chat", "make_data"), script("support-chat", "ask")


def test_conversations_are_openais_messages(tmp_path: Path) -> None:
    count = make_data.write(tmp_path, 50, seed=0)
    train = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(train) == 50
    for line in train:
        roles = [message["role"] for message in json.loads(line)["messages"]]
        assert roles[0] == "system"
        assert roles[1:] == ["user", "assistant"] * ((len(roles) - 1) // 2)
        assert 3 <= len(roles) <= 7
    held_out = (tmp_path / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(held_out) == count == 2 * 4 * len(make_data.LAMPS)
    for line in held_out:
        record = json.loads(line)
        assert ask.is_right(record["messages"][-1]["content"], record["value"])


def test_no_held_out_question_is_trained_on() -> None:
    trained = {
        message["content"]
        for record in make_data.training(500, 0)
        for message in record["messages"]
        if message["role"] == "user"
    }
    asked = {record["messages"][1]["content"] for record in make_data.held_out(0)}
    assert not trained & asked
    assert all(
        any(question in trained for question in fact.questions(False))
        for fact in make_data.facts(0)
    ), "every fact is in the conversations"


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert make_data.training(9, 4) == make_data.training(9, 4) != make_data.training(9, 5)
    assert make_data.held_out(4) == make_data.held_out(4) != make_data.held_out(5)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("The Alta lamp has a guarantee of 7 years.", True),
        ("7 YEARS", True),
        ("It is 7\nyears!", True),
        ("17 years", False),
        ("7 days, not years", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_says_the_value(answer: str, right: bool) -> None:
    assert ask.is_right(answer, "7 years") is right
