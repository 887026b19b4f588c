"""Which test files a run of pytest needs, and in which order: from their text, before any import.

A test run imports the files that it collects, and all of them take half a minute of a core.
"""

from __future__ import annotations

import ast
import re
from itertools import combinations

MARKS = frozenset(("slow", "waits", "runs", "stops", "alone"))
"""The marks of pyproject.toml. A file's text names all marks of its tests."""
DEAREST = (
    "examples/test_public_run.py",
    "e2e/test_readme.py",
    "e2e/test_versions.py",
    "e2e/test_engine.py",
    "e2e/test_adapters.py",
    "e2e/test_network.py",
    "e2e/test_not_finite.py",
    "e2e/test_replicas.py",
    "e2e/test_record.py",
    "e2e/test_tasks.py",
    "benchmarks/test_quality_run.py",
    "e2e/test_api.py",
    "e2e/test_own_code.py",
    "e2e/test_recommitted.py",
    "e2e/test_wire_bytes.py",
    "e2e/test_flush.py",
    "inner/test_site_model.py",
    "tools/planner/test_link_probe.py",
    "tools/audit/test_cheats.py",
    "transport/test_failing_sites.py",
    "inner/test_counted.py",
    "inner/test_adapters.py",
    "inner/test_compilation.py",
    "inner/test_head_loss.py",
    "transport/test_unreached.py",
    "tools/report/test_browser.py",
    "transport/test_groups.py",
    "inner/test_precision.py",
    "benchmarks/test_gpu.py",
    "outer/test_invariants.py",
    "tools/settlement/test_chain_command.py",
    "tools/planner/test_promises.py",
    "inner/test_muon.py",
    "tools/audit/test_resumed.py",
)
"""Files below `tests` that go first, by the time that they take. A worker that begins a long file
when the others are through would end alone."""
_NAMED = re.compile(r"\bmark\.(slow|waits|runs|stops|alone)\b")
_OF_ALL = re.compile(r"^pytestmark = (?:\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)


def may_be_selected(source: str, expression: str) -> bool:
    """Return whether `-m expression` may select a test of the file with the text `source`.

    `pytestmark` gives marks to all tests of a file. Any other mark in the text is one that some of
    its tests may have, in any combination. True for an expression with other words than `MARKS`.
    """
    try:
        wanted = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        return True
    known = (ast.BoolOp, ast.UnaryOp, ast.Name, ast.And, ast.Or, ast.Not, ast.Load)
    nodes = list(ast.walk(wanted))
    if not all(isinstance(node, known) for node in nodes):
        return True
    if not {node.id for node in nodes if isinstance(node, ast.Name)} <= MARKS:
        return True
    always, perhaps = marks_in(source)
    return any(
        _holds(wanted, always | set(some))
        for count in range(len(perhaps) + 1)
        for some in combinations(sorted(perhaps), count)
    )


def marks_in(source: str) -> tuple[set[str], set[str]]:
    """Return the marks of all tests of a file, and the others that its text names."""
    always = set(_NAMED.findall("\n".join(_OF_ALL.findall(source))))
    return always, set(_NAMED.findall(source)) - always


def _holds(node: ast.expr, marks: set[str]) -> bool:
    """Evaluate an expression of `and`, `or`, `not` and names for a test with these marks."""
    if isinstance(node, ast.BoolOp):
        values = [_holds(each, marks) for each in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.UnaryOp):
        return not _holds(node.operand, marks)
    assert isinstance(node, ast.Name)
    return node.id in marks


def place(file: str) -> int:
    """Return where in the order of files `file` stands, a path below `tests`."""
    return DEAREST.index(file) if file in DEAREST else len(DEAREST)
