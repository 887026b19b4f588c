"""The house's layout: which package may import which, and how long modules and functions are.

The contracts stand in pyproject.toml (`[tool.importlinter]`). They count imports inside functions
and under `if TYPE_CHECKING`, too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dilocox

SOURCE = Path(dilocox.__file__).parent
ROOT = SOURCE.parents[1]
LINES, FUNCTION, PARAMETERS = 500, 80, 8
"""Most lines of a module, most lines of a function, most parameters of a function."""
PACKAGES, MODULES = 13, 6
"""Most packages, and most modules beside `__init__` and `__main__`, at the top of dilocox."""
TOO_LARGE = {"api.join", "api.site", "api.train"}
"""Functions with more lines or parameters than the limits. None may be added.

Users call these three with keywords, so their parameters are not put into records.
"""


def modules() -> Iterator[tuple[str, str]]:
    """(name, source) of every module below `SOURCE`, `outer.loop` say."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path.read_text(encoding="utf-8")


def too_large(source: str) -> Iterator[str]:
    """Functions of `source` with more lines or parameters than allowed, by qualified name."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                names += [a.arg for a in (given.vararg, given.kwarg) if a is not None]
                own = [name for name in names if name not in ("self", "cls")]
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION or len(own) > PARAMETERS:
                    yield f"{prefix}{node.name}"
                yield from inside(node.body, f"{prefix}{node.name}.")

    yield from inside(ast.parse(source).body, "")


def test_imports_only_go_where_they_may() -> None:
    """By the contracts in pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()",
         "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_modules_are_short() -> None:
    lengths = {name: source.count("\n") for name, source in modules()}
    assert len(lengths) > 300
    assert {name: lines for name, lines in lengths.items() if lines > LINES} == {}


def test_functions_are_short() -> None:
    found = {f"{name}.{function}" for name, source in modules() for function in too_large(source)}
    assert found == TOO_LARGE


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n" + "    x = 1\n" * 80, ["f"]),
        ("def f():\n" + "    x = 1\n" * 79, []),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, *h, i): ...", ["A.f"]),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, *h): ...", []),
        ("async def f():\n    def g(a, b, c, d, e, f, g, h, i): ...", ["f.g"]),
    ],
)
def test_a_large_function_is_found(source: str, expected: list[str]) -> None:
    assert list(too_large(source)) == expected


LOOP = "OuterLoop"
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault",
           "sort", "update"}  # fmt: skip
"""Methods that change a list, a set or a dict."""


def loop_names(tree: ast.AST) -> Iterator[str]:
    """Names that `tree` annotates with `OuterLoop`, or sets to a new one."""
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.arg) and node.annotation and LOOP in ast.unparse(node.annotation):
            targets = [node.arg]
        elif isinstance(node, ast.AnnAssign) and LOOP in ast.unparse(node.annotation):
            targets = [ast.unparse(node.target)]
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(f"{LOOP}("):
            targets = [ast.unparse(each) for each in node.targets]
        yield from (target.rpartition(".")[2] for target in targets)


def changed_in_a_loop(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """What `tree` changes inside an outer loop that has one of `names`."""

    def inside(node: ast.expr) -> bool:
        """Whether `node` is a loop, or reached from one by attributes and indices."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute) and node.attr in names:
                return True
            node = node.value
        return isinstance(node, ast.Name) and node.id in names

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and inside(node.value):
            if not isinstance(node.ctx, ast.Load):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            part = isinstance(of, ast.Attribute | ast.Subscript) and inside(of.value)
            if part and node.func.attr in CHANGES:
                yield ast.unparse(node.func)


def test_an_outer_loop_changes_by_its_methods_alone() -> None:
    """Else a reader has to look for its flags in every module that has one."""
    sources = dict(modules())
    names = {
        name: set(loop_names(ast.parse(source)))
        for name, source in sources.items()
        if LOOP in source
    }
    assert set().union(*names.values()) == {"outer"}, "loops have one name, by which they are found"
    # Elsewhere `outer` is a table of the run file.
    rooms = tuple(f"{name.rpartition('.')[0]}." for name, own in names.items() if own)
    found = {
        name: changes
        for name, source in sources.items()
        if name.startswith(rooms) and name != "outer.loop" and "outer." in source
        if (changes := list(changed_in_a_loop(ast.parse(source), {"outer"})))
    }
    assert {"training.", "tools.audit."} <= set(rooms)
    assert found == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("own.outer.behind = True", ["own.outer.behind"]),
        ("counts, outer.counts = outer.counts, 0", ["outer.counts"]),
        ("self.outer.status.rounds += 1", ["self.outer.status.rounds"]),
        ("outer.landed[0] = 3", ["outer.landed[0]"]),
        ("outer.restored.append(3)", ["outer.restored.append"]),
        ("outer.states[0].names.clear()", ["outer.states[0].names.clear"]),
        ("self.outer = own.outer; outer.adopt(3); outer.update(); x = outer.landed[0]", []),
        ("outer.status.drop_round()", []),
    ],
)
def test_a_change_in_an_outer_loop_is_found(source: str, expected: list[str]) -> None:
    tree = ast.parse(f"outer: OuterLoop\n{source}")
    assert list(changed_in_a_loop(tree, set(loop_names(tree)))) == expected


def test_the_top_is_small() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    loose = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert len(packages) <= PACKAGES, packages
    assert len(loose) <= MODULES, loose


def test_coordinator_and_data_run_without_torch() -> None:
    """They serve machines that have no GPU, and start in a moment."""
    names = [
        f"dilocox.{name}"
        for name, _ in modules()
        if name.startswith(("coordinator", "data", "config"))
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "print(','.join(n for n in ('torch', 'transformers', 'pyarrow') if n in sys.modules))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    )
    assert len(names) > 60
    assert answer.stdout.strip() == ""
