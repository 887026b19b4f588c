"""What the engine reads: links, and how answers end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.base_model import write_base

from dilocox.tools.serving.served_folder import link_files, name_answers

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def served(source: Path, target: Path, template: str | None) -> Path:
    link_files(source, target)
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    name_answers(target)
    return target


def settings(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tokenizer_config.json").read_text()))


def test_an_answer_is_what_follows_the_prompt_up_to_its_end(source: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    before = (source / "tokenizer_config.json").read_bytes()
    folder = served(source, tmp_path / "served", "{{ messages[0].content }}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = tokenizer("the value")["input_ids"]
    found = tokenizer.parse_response(
        [*made, tokenizer.eos_token_id], settings(folder)["response_template"], prefix="user: hi\n"
    )
    assert found == {"role": "assistant", "content": "the value"}
    assert (source / "tokenizer_config.json").read_bytes() == before


def test_named_templates_are_served_too(source: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    link_files(source, model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(model)
    assert (model / "additional_chat_templates").is_dir()
    folder = served(model, tmp_path / "served", None)
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("template", [None, CHATML])
def test_where_transformers_knows_better_nothing_is_written(
    source: Path, tmp_path: Path, template: str | None
) -> None:
    folder = served(source, tmp_path / "served", template)
    assert (folder / "tokenizer_config.json").is_symlink()
    assert (folder / "model.safetensors").samefile(source / "model.safetensors")


def test_a_parser_of_the_model_s_own_stays(source: Path, tmp_path: Path) -> None:
    link_files(source, tmp_path / "served")
    config = tmp_path / "served" / "tokenizer_config.json"
    own = settings(tmp_path / "served") | {"response_template": {"mine": 1}}
    config.unlink()
    config.write_text(json.dumps(own))
    (tmp_path / "served" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    name_answers(tmp_path / "served")
    assert settings(tmp_path / "served")["response_template"] == {"mine": 1}
