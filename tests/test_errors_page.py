"""docs/errors.md quotes messages that dilocox prints."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
VARIES = "…"
"""What stands for names and numbers, on the page and in `texts_of`."""


def quoted() -> list[str]:
    """The messages of the page: the code in the first cell of its rows."""
    return re.findall(r"^\| `(.+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def texts_of(source: str) -> list[str]:
    """All texts of a module but docstrings, with `VARIES` for what an f-string fills in."""
    found = []
    nodes = list(ast.walk(ast.parse(source)))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if id(node) in docs:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else VARIES for p in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@functools.cache
def printed() -> str:
    sources = sorted((ROOT / "src" / "dilocox").rglob("*.py"))
    return "\n".join(
        text for path in sources for text in texts_of(path.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_dilocox(message: str) -> None:
    found = message in printed()
    assert found, "the message was changed: change docs/errors.md, too"


def test_the_page_has_what_users_meet_and_nothing_twice() -> None:
    assert len(quoted()) >= 25
    assert len(set(quoted())) == len(quoted())
    assert all(len(message) >= 12 for message in quoted()), "long enough to be distinctive"


def test_texts_have_a_mark_for_what_varies() -> None:
    source = 'name = "a"\nraise ValueError(f"site {name}: not in " "the run file")\n'
    assert f"site {VARIES}: not in the run file" in texts_of(source)
    assert texts_of('"""What a module is."""\n') == []
