"""Files of JSON objects, one per line: only a line feed ends a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.utils.json_lines import is_torn, lines_of_text, object_of, read_json_lines

OTHER_BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def test_other_breaks_are_no_ends_of_lines(tmp_path: Path) -> None:
    text = "".join(f"{mark}{number}" for number, mark in enumerate(OTHER_BREAKS))
    assert lines_of_text(f"{text}\n\n{text}") == [text, "", text]
    assert lines_of_text(f"{text}\n") == [text]
    assert lines_of_text("") == []
    (tmp_path / "file").write_bytes(f"{text}\n".encode() + b"\xff\n")
    assert read_json_lines(tmp_path / "file") == [text, "\N{REPLACEMENT CHARACTER}"]


@pytest.fixture(autouse=True)
def _usual_recursion() -> Iterator[None]:
    """Packages that other tests of a worker import may have raised Python's limit."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    "line", ["", "{", "[1]", "null", "{} {}", "[" * 100_000, "NaN", "\ufeff{}"]
)
def test_what_is_no_object_is_damaged(line: str) -> None:
    assert object_of(line) is None


def test_every_begin_of_a_line_is_torn() -> None:
    line = json.dumps({"text": 'a "{" ü \n', "list": [1.5e-7, None, True], "more": {"b": -1}})
    for end in range(len(line)):
        assert object_of(line[:end]) is None
        assert is_torn(line[:end])
        assert is_torn(line[:end] + "\0" * 9 + "\n")
    assert is_torn(line + "\0\0\n")


@pytest.mark.parametrize(
    "line", ['{"a": 1} {"a": 2}', '{"a": 1}\r{"a": 2}', '{"a": 1}]', '{"a": "\u2028', "[1, ", "x{"]
)
def test_other_damage_is_not_torn(line: str) -> None:
    assert object_of(line) is None
    assert not is_torn(line)
