from __future__ import annotations

import tomllib
from typing import Any

import pytest

from dilocox.config.data import RowRules
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError

RAW = {"model": {"architecture": {"model_type": "qwen3"}}, "sites": {"paris": {}, "lyon": {}}}


def run(**data: Any) -> RunConfig:
    return resolve_run({**RAW, "data": data})


def test_keys_of_conversations_need_such_a_format() -> None:
    for key, value in (
        ("messages_field", "talk"),
        ("prompt_field", "question"),
        ("prompt_field", ["instruction", "input"]),
        ("completion_field", "answer"),
        ("chat_template", "chat.jinja"),
        ("loss_on", "all"),
    ):
        with pytest.raises(ConfigError, match=rf'data\.{key} needs format = "chat", "instruc'):
            run(**{key: value})
        run(format="instruction", **{key: value})


def test_a_trained_tokenizer_needs_a_template_for_chat() -> None:
    with pytest.raises(ConfigError, match="trained tokenizer has no chat template: set chat_t"):
        run(format="chat")
    run(format="chat", chat_template="chat.jinja")
    run(format="chat", tokenizer="team/tiny")
    run(format="instruction")


def test_loss_on_has_three_values() -> None:
    with pytest.raises(ConfigError, match=r"data\.loss_on"):
        run(format="instruction", loss_on="user")


def test_a_run_on_text_keeps_its_digest() -> None:
    """The keys are not in it at their defaults, so runs of before go on."""
    shared = run(source="text").shared(without_defaults=True)
    assert shared["data"] == {"source": "text"}
    digests = {
        run(source="text", **more).digest()
        for more in (
            {},
            {"format": "instruction"},
            {"format": "instruction", "loss_on": "all"},
            {"format": "instruction", "chat_template": "a"},
        )
    }
    assert len(digests) == 4


def test_conversations_are_packed_whole_and_cut_unless_the_run_file_says_otherwise() -> None:
    assert run().data.rows == RowRules(256, "stream", "split")
    assert run(format="instruction").data.rows == RowRules(256, "documents", "cut")
    own = run(format="instruction", packing="none", long_documents="refuse")
    assert own.data.rows == RowRules(256, "none", "refuse")


def test_a_filter_is_the_same_with_dots_and_with_tables() -> None:
    nested = run(source="a", filter={"meta": {"language": "en"}, "stars": [4, 5]})
    dotted = run(source="a", filter={"meta.language": "en", "stars": [4, 5]})
    assert nested.digest() == dotted.digest() != run(source="a").digest()
    assert nested.data.filter == {"meta.language": "en", "stars": [4, 5]}
    assert resolve_run(tomllib.loads(nested.to_toml())).data.filter == nested.data.filter


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"filter": "en"}, 'data.filter: got "en", expected a table'),
        ({"filter": {"a": []}}, "data.filter: a is an empty list, so no record would be taken"),
        ({"filter": {"a": {}}}, "data.filter: a is an empty table: name a field in it"),
        ({"filter": {"a": [1, [2]]}}, "data.filter: a is [2]: give a text, a finite number, true"),
        ({"filter": {"a": float("nan")}}, "data.filter: a is nan: give a text, a finite number"),
        (
            {"filter": {"a": {"b": 1}, "a.b": 2}},
            "data.filter: a.b is there twice: leave one out",
        ),
        (
            {"filter": {"a": 1}, "format": "text"},
            'data.filter needs records with fields, and format "text" has none: leave it out',
        ),
        (
            {"validation_filter": {"a": 1}},
            "data.validation_filter needs validation_source: set it, or leave it out",
        ),
    ],
)
def test_bad_filters_are_refused_in_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(source="a", **data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
