"""Absolute paths of a machine are found in published files, by their keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilocox.tools.release.local_paths import local_paths, told_paths

RUN = """
[model]
path = "/home/anna/models/base"
[data]
source = "~/corpus/text.txt"
tokenizer = "train"
folder = "/data"
[[data.sources]]
path = "s3://bucket/home/anna"
[[data.sources]]
path = "file:///srv/anna/x"
[evaluation]
prompt = "and/or one / two /"
tasks = ["/opt/anna/tasks.py:evaluation", "piqa"]
"""


def test_keys_of_the_run_file() -> None:
    assert local_paths("run.toml", RUN.encode()) == [
        "data.source", "data.sources.path", "evaluation.tasks", "model.path",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "keys"),
    [
        ("model/config.json", {"a": {"_name_or_path": "/home/anna/m"}}, ["a._name_or_path"]),
        ("adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen3"}, []),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": "/a/b"}}}, []),
        ("tokenizer.json", {"model": {"merges": ["/usr/bin"]}}, []),
        ("CHECK.md", "/home/anna/m", []),
        ("list.json", ["/home/anna/m"], [""]),
        ("list.json", ["file:/home/anna/m"], [""]),
        ("list.json", ["file://localhost/home/anna/m"], [""]),
        ("list.json", ["~anna/models/base"], [""]),
        ("list.json", ["https://host/home/anna/m"], []),
    ],
)
def test_keys_of_json_files(name: str, value: object, keys: list[str]) -> None:
    assert local_paths(name, json.dumps(value).encode()) == keys


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000])
def test_a_broken_file_has_no_keys(text: bytes) -> None:
    assert local_paths("model/config.json", text) == []
    assert local_paths("run.toml", text) == []


def test_a_published_folder_is_told_by_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "model" / "config.json").write_text('{"_name_or_path": "/home/anna/m"}')
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    lines = list(told_paths(tmp_path))
    assert [line.split(": ")[1] for line in lines] == ["run.toml", "model/config.json"]
    assert lines[1].endswith(": _name_or_path")
