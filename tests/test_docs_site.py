"""The documentation as a site: `make docs`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from docs_site import COPIES, indented, linked_outside, relinked  # noqa: E402


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` does: broken links and anchors, and pages without a place in the navigation,
    are warnings, and end the build."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install mkdocs-material)")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "planner.html").read_text(encoding="utf-8")
    assert f'href="{COPIES}/src/dilocox/tools/planner/devices.toml"' in page
    assert (tmp_path / "site" / COPIES / "src/dilocox/tools/planner/devices.toml").is_file()
    for written in (tmp_path / "site").glob("*.html"):
        text = written.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="(https?://[^"]+)"', text)
        assert fetched == [], "a page is read without fetching anything from elsewhere"


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("planner.md", "methods.md#codecs", "methods.md#codecs"),
        ("planner.md", "../README.md#two-real-sites", "index.md"),
        ("planner.md", "../examples/quickstart.toml", f"{COPIES}/examples/quickstart.toml"),
        ("notes/wan.md", "../../examples/quickstart.toml", f"../{COPIES}/examples/quickstart.toml"),
        ("notes/wan.md", "../../benchmarks/wan", f"../{COPIES}/benchmarks/README.md"),
        (f"{COPIES}/benchmarks/README.md", "../docs/measured.md#x", "../../measured.md#x"),
        ("notes/wan.md", "../algorithm.md", "../algorithm.md"),
        (f"{COPIES}/SECURITY.md", "docs/network.md#x", "../network.md#x"),
        (f"{COPIES}/CONTRIBUTING.md", "SECURITY.md", "SECURITY.md"),
        ("planner.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("planner.md", "#here", "#here"),
        ("planner.md", "nowhere.md", "nowhere.md"),
    ],
)
def test_links_hold_in_the_repository_and_on_the_site(page: str, link: str, there: str) -> None:
    assert relinked(f"see [it]({link}).", page) == f"see [it]({there})."


def test_links_in_code_stay() -> None:
    code = "```\n[a](../README.md)\n```\n"
    assert relinked(code, "planner.md") == code


def test_what_is_linked_outside_is_there() -> None:
    outside = linked_outside()
    assert {"SECURITY.md", "examples/quickstart.toml", "constraints.txt"} <= outside
    assert all((ROOT / path).is_file() for path in outside)
    assert "README.md" not in outside


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Text:\n- one\n- two\n", "Text:\n\n- one\n- two\n"),
        ("- one\n  goes on\n\nText\n", "- one\n    goes on\n\nText\n"),
        ("1. one\n\n   ```\n   code\n   ```\n", "1. one\n\n    ```\n    code\n    ```\n"),
        ("Text\n  indented\n", "Text\n  indented\n"),
        ("```\n- no list\n  at all\n```\n", "```\n- no list\n  at all\n```\n"),
    ],
)
def test_lists_are_as_python_markdown_wants_them(written: str, read: str) -> None:
    assert indented(written) == read
