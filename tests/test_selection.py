"""Files without a selected test are not imported, and dear ones go first."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.selection import DEAREST, MARKS, marks_in, may_be_selected, place

TESTS = Path(__file__).parent
PLAIN = "def test_it() -> None: ...\n"
SOME = f"@pytest.mark.slow\n{PLAIN}{PLAIN}"
ALL = f"pytestmark = pytest.mark.runs\n{SOME}"
SEVERAL = (
    f"pytestmark = [\n    pytest.mark.alone,\n    pytest.mark.skipif(A[0], reason=''),\n]\n{PLAIN}"
)
"""The marks of a file, in the four ways in which files have them."""


@pytest.mark.parametrize(
    ("source", "expression", "expected"),
    [
        (PLAIN, "not slow and not waits", True),
        (PLAIN, "not slow and runs", False),
        (PLAIN, "", True),
        (SOME, "slow", True),
        (SOME, "not slow", True),
        (SOME, "alone or waits", False),
        (ALL, "runs", True),
        (ALL, "runs and slow", True),
        (ALL, "not slow and runs", True),
        (ALL, "not runs", False),
        (ALL, "waits or (not slow and alone)", False),
        (SEVERAL, "not slow and alone", True),
        (SEVERAL, "not alone", False),
        (SEVERAL, "slow", False),
        # Not only the four marks, or no expression at all: pytest decides, or says what is wrong.
        (PLAIN, "runs and gpu", True),
        (PLAIN, "runs(1)", True),
        (PLAIN, "runs and", True),
    ],
)
def test_a_file_is_left_out_when_none_of_its_tests_is_selected(
    source: str, expression: str, expected: bool
) -> None:
    assert may_be_selected(source, expression) is expected


def test_marks_stand_in_the_files_whose_tests_have_them() -> None:
    """A mark that a file imports would not be seen in its text."""
    for file in [*TESTS.rglob("conftest.py"), *(TESTS / "support").rglob("*.py")]:
        if file.name != "selection.py":
            text = file.read_text(encoding="utf-8")
            assert not [mark for mark in MARKS if f"mark.{mark}" in text], file


def test_files_that_go_first_are_there() -> None:
    assert [file for file in DEAREST if not (TESTS / file).exists()] == []
    assert place(DEAREST[0]) < place(DEAREST[-1]) < place("e2e/test_trace.py")


def test_marks_are_read_as_python_reads_them() -> None:
    read = 0
    for file in sorted(TESTS.rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        if file.name == Path(__file__).name or "pytestmark" not in source:
            continue
        tree = ast.parse(source)
        of_all = [
            node
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        always = named(of_all)
        assert marks_in(source) == (always, named([tree]) - always), file
        read += bool(always)
    assert read > 100


def named(trees: Iterable[ast.AST]) -> set[str]:
    """Marks of `MARKS` that stand as `pytest.mark.NAME` below some nodes."""
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in MARKS
        and ast.unparse(node.value) == "pytest.mark"
    }
