"""The house's floors: imports only go down, there are no cycles, and no module is too long.

Imports under `if TYPE_CHECKING` name a type and run nothing: they are left out.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import dilocox

pytestmark = pytest.mark.waits

SOURCE = Path(dilocox.__file__).parent
LONGEST = 500

FLOORS = (
    {
        "version",
        "errors",
        "backoff",
        "config_section",
        "timeline",
        "errands",
        "torch_internals",
        "plain_text",
        "append_file",
        "best_model",
        "library_warnings",
        "typed_json",
        "formatting",
    },
    {
        "storage",
        "site_reports",
        "checkpoint_index",
        "trace_file",
        "codec_spec",
        "methods",
        "problems",
        "processes",
        "launcher_env",
        "join_token",
        "own_code",
        "versions",
        "wireguard",
    },
    {"config_rounds", "config_keeping", "config_site", "config_handover"},
    {"config_admission"},
    {"config"},
    {"compression", "cuda_driver", "display", "metrics", "checkpoint", "handover"},
    {"site", "outer", "data", "models", "recorder", "model_files"},
    {"batches", "memory", "record", "tokenizer_check", "weights_check"},
    {"assembly", "determinism"},
    {"payloads", "rank_errors", "meter"},
    {"record_volume", "rank_state"},
    {"gradient_exchange", "piece_digests"},
    {"persistence", "entering", "preflight", "handing_over", "rank_network", "site_log"},
    {"trainer"},
    {"rank_process", "audit"},
    {"supervisor"},
    {"site_process"},
    {"coordinating", "launched"},
    {"launch"},
    {"api", "lab", "plan", "report"},
    {"release"},
    {"dilocox"},
    {"cli"},
    {"__main__"},
)
"""Lowest first. A room may use itself and what lies on floors below its own."""


def modules(root: Path) -> dict[str, str]:
    """Source of every module below `root` by name, `outer.loop` say; packages by their folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path.read_text(encoding="utf-8")
    return found


def imports(source: str, known: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """(module of dilocox, imported at the top of the file) for every import that is run."""
    for node, top in _statements(ast.parse(source).body, True):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.removeprefix("dilocox.") in known else str(node.module)
                for name in inner
            ]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "dilocox":
                yield name.removeprefix("dilocox").removeprefix("."), top


def _statements(body: list[ast.stmt], top: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.orelse, top)
            continue
        yield node, top
        inside = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, part, []), inside)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, inside)


def room_of(module: str) -> str:
    return module.split(".")[0] or "dilocox"


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """Every rule that `sources` break, as one line each."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    problems = []
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        room = room_of(module)
        if room not in floor:
            problems.append(f"{module}: its room has no floor")
            continue
        lines = source.count("\n")
        if lines > LONGEST:
            problems.append(f"{module}: {lines} lines, more than {LONGEST}")
        graph[module] = set()
        for target, top in imports(source, sources):
            other = room_of(target)
            if top:
                graph[module].add(target)
            if other == room:
                continue
            if other not in floor or floor[other] >= floor[room]:
                problems.append(f"{module} imports {target or 'dilocox'}: not on a floor below")
    return problems + [f"cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One cycle per module that lies on one, found depth first."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
            return
        if module in done:
            return
        for target in sorted(graph.get(module, ())):
            visit(target, [*path, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def test_the_house_keeps_its_floors() -> None:
    assert broken_rules(modules(SOURCE)) == []


def test_all_of_the_house_was_looked_at() -> None:
    known = modules(SOURCE)
    assert {room_of(module) for module in known} <= set().union(*FLOORS)
    assert len(known) > 80
    edges = {(m, t) for m, source in known.items() for t, _ in imports(source, known)}
    assert ("trainer", "rank_state") in edges
    assert ("cli", "launch") in edges, "imports inside functions count too"
    assert ("persistence", "outer.loop") not in edges, "imports for types alone do not"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"outer.a": "from dilocox.inner import x"}, "outer.a imports site: not on a floor below"),
        ({"outer.a": "import dilocox.models"}, "outer.a imports models: not on a floor below"),
        ({"compression.a": "from dilocox.outer.loop import x"}, "imports outer.loop: not on a"),
        ({"compression.a": "from dilocox import site", "site": ""}, "compression.a imports site"),
        (
            {"config": "def f():\n    from dilocox.training.launch.local import x"},
            "config imports launch: not",
        ),
        (
            {"data.a": "try:\n    pass\nexcept E:\n    import dilocox.cli.main"},
            "data.a imports cli",
        ),
        ({"trainer": "from dilocox import load_run"}, "trainer imports dilocox: not on a floor"),
        ({"attic": ""}, "attic: its room has no floor"),
        ({"cli": "\n" * 501}, "cli: 501 lines, more than 500"),
        (
            {"site.a": "from dilocox.inner import b", "site.b": "import dilocox.inner.a"},
            "cycle: site.a -> site.b -> site.a",
        ),
    ],
)
def test_a_broken_rule_is_found(sources: dict[str, str], expected: str) -> None:
    assert any(expected in problem for problem in broken_rules(sources))


@pytest.mark.parametrize(
    "sources",
    [
        {"outer.a": "from dilocox.compression import x\nfrom dilocox.errors import E"},
        {"trainer": "import dilocox.inner\nimport os, torch"},
        {"site.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dilocox.outer"},
        {"cli": "\n" * 500},
        {"site.a": "from dilocox.inner import b", "site.b": "def f():\n    import dilocox.inner.a"},
    ],
)
def test_a_rule_that_is_kept_is_no_problem(sources: dict[str, str]) -> None:
    assert broken_rules(sources) == []


def test_coordinator_and_data_run_without_torch() -> None:
    """They serve machines that have no GPU, and start in a moment."""
    names = [
        f"dilocox.{module}"
        for module in modules(SOURCE)
        if module.startswith(("outer.coordinator", "outer.controller", "data"))
        or module in ("config", "recorder")
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
    assert len(names) > 25
    assert answer.stdout.strip() == ""
