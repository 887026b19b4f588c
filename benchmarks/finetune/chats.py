"""Conversations of the fine-tuning benchmark, made from the standard library and WikiText-2.

A conversation is a question and an answer. Questions of the first kind show a function of Python's
standard library without its docstring; the answer is the docstring's first paragraph. Questions of
the second kind show the first half of a paragraph of WikiText-2; the answer is the second half.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

QUESTION = "Say in one sentence what this Python function does."
CONTINUE = "Continue this text."
SUMMARY = (25, 200)
"""Least and largest number of characters of a docstring's first paragraph."""
SOURCE = (80, 900)
"""Least and largest number of characters of a function's source without its docstring."""
PARAGRAPH = (300, 1000)
"""Least and largest number of characters of a paragraph of WikiText-2."""
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages"}
HELD_OUT = 16
"""One conversation of so many is held out."""


@dataclass(frozen=True)
class Chat:
    """One question and its answer."""

    question: str
    answer: str

    @property
    def line(self) -> str:
        """The conversation as a line of JSON."""
        said = [("user", self.question), ("assistant", self.answer)]
        return json.dumps({"messages": [{"role": role, "content": text} for role, text in said]})

    @property
    def held_out(self) -> bool:
        """Whether nobody trains on the conversation: by a hash of its question."""
        digest = hashlib.sha256(self.question.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT == 0


def of_functions(folder: Path | None = None) -> list[Chat]:
    """Return the conversations about functions, in order of path and line.

    `folder`: where modules are; None: the standard library. A function of which another one has the
    same source or the same docstring is left out.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    chats: list[Chat] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            module = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue  # some modules of the library are wrong on purpose
        for chat in _of_module(source, module):
            if not {chat.question, chat.answer} & seen:
                seen |= {chat.question, chat.answer}
                chats.append(chat)
    return chats


def _of_module(source: str, module: ast.Module) -> Iterator[Chat]:
    lines = source.splitlines()
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or len(node.body) < 2:
            continue
        summary = " ".join(docstring.split("\n\n")[0].split())
        head = lines[node.lineno - 1 : node.body[0].lineno - 1]
        rest = lines[node.body[0].end_lineno or 0 : node.end_lineno]
        code = textwrap.dedent("\n".join(head + rest))
        if _within(summary, SUMMARY) and _within(code, SOURCE):
            yield Chat(f"{QUESTION}\n\n{code}", summary)


def of_paragraphs(files: list[Path]) -> list[Chat]:
    """Return the conversations about paragraphs of text files, in order."""
    chats = []
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            text = line.strip()
            if text.startswith("=") or not _within(text, PARAGRAPH):
                continue
            words = text.split()
            half = len(words) // 2
            question = f"{CONTINUE}\n\n{' '.join(words[:half])}"
            chats.append(Chat(question, " ".join(words[half:])))
    return chats


def _within(text: str, limits: tuple[int, int]) -> bool:
    return limits[0] <= len(text) <= limits[1]
