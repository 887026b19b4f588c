"""The table of outside services that fail names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "notes" / "outside-services.md"
SERVICES = ("chain's server", "S3", "0G node", "sites' stores", "agent", "witness")


def test_each_test_of_the_table_exists() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    named = {name for row in rows for name in re.findall(r"`(tests/[\w/.]+::\w+)`", row)}
    assert len(named) > 20
    for each in named:
        path, _, name = each.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        found = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert name in found, each


def test_each_service_has_each_fault() -> None:
    rows = [line.split("|")[1:4] for line in TABLE.read_text().splitlines() if "::" in line]
    for service in SERVICES:
        faults = " ".join(fault for name, fault, _ in rows if service in name)
        for fault in ("dead", "hangs"):
            assert fault in faults, (service, fault)
        assert "lies" in faults or "changes bytes" in faults, service
