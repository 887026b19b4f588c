"""Command lines and files for other servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilocox.errors import CheckpointError
from dilocox.tools.serving.other_servers import chat_template, modelfile, vllm_line


def test_a_whole_model_is_served_under_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    assert vllm_line(folder, "ours") == f"vllm serve '{folder}' --served-model-name ours"


@pytest.mark.parametrize(("rank", "held"), [(3, 8), (8, 8), (9, 16), (200, 256)])
def test_adapters_are_served_beside_their_base(tmp_path: Path, rank: int, held: int) -> None:
    said = {"base_model_name_or_path": "org/base", "r": rank}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    assert vllm_line(tmp_path, "ours") == (
        f"vllm serve org/base --enable-lora --max-lora-rank {held} --lora-modules ours={tmp_path}"
    )


def test_a_template_is_found_where_it_may_be(tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "x"}')
    assert chat_template(tmp_path) is None
    config.write_text('{"chat_template": "{{ messages }}"}')
    assert chat_template(tmp_path) == "{{ messages }}"
    config.unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert chat_template(tmp_path) == "{{ messages }}"


def test_a_stop_stands_between_quotes_as_it_is() -> None:
    ends = ["<\uff5cend\uff5c>", 'has " in it']
    assert modelfile("m.gguf", ends) == 'FROM ./m.gguf\nPARAMETER stop "<\uff5cend\uff5c>"\n'


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        chat_template(tmp_path)
    if content == b"\xff":
        (tmp_path / "chat_template.jinja").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
            chat_template(tmp_path)
