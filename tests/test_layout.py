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
PACKAGES, MODULES = 13, 4
"""Most packages, and most modules beside `__init__` and `__main__`, at the top of dilocox."""
TOO_LARGE = {"api.join", "api.train"}
"""Functions with more lines or parameters than the limits. None may be added.

Users call these two with keywords, so their signatures stay as they are.
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
