"""Pinned, hashed, and looked up: what an installation takes."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from audit_dependencies import judge  # noqa: E402
from setup_venv import BUILD, SOURCES  # noqa: E402

pytestmark = pytest.mark.waits


def pins(name: str) -> dict[str, str]:
    """Versions by package, of lines such as `name==version ; marker`."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [re.match(r"([A-Za-z0-9_.-]+)==([^\s;\\]+)", line) for line in lines]
    return {canonical(each[1]): each[2] for each in found if each}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_file_with_hashes_is_of_the_tested_versions() -> None:
    """`make lock` writes it anew."""
    hashed, tested = pins("requirements-hashed.txt"), pins("constraints.txt")
    wanted = [
        *project()["project"]["dependencies"], *project()["dependency-groups"]["build"],
    ]  # fmt: skip
    names = {canonical(re.split(r"[\[<>=]", each)[0]) for each in wanted}
    assert names <= hashed.keys()
    assert names <= tested.keys()
    assert {n: v for n, v in hashed.items() if n in tested} == {
        n: v for n, v in tested.items() if n in hashed
    }


def test_every_pin_has_hashes_and_nothing_else_is_in_the_file() -> None:
    text = (ROOT / "requirements-hashed.txt").read_text(encoding="utf-8")
    body = "".join(line + "\n" for line in text.splitlines() if not line.startswith("#"))
    one = r"[A-Za-z0-9_.-]+==[^\n\\]+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
    assert re.fullmatch(f"(?:{one})+", body)


def test_lower_bounds_are_what_the_lowest_versions_install() -> None:
    lowest = pins("constraints-lowest.txt")
    bounds = dict(
        re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each).groups()  # type: ignore[union-attr]
        for each in project()["project"]["dependencies"]
    )
    for name in ("aiohttp", "jinja2", "urllib3", "cryptography"):
        assert lowest[name].startswith(bounds[name]), name


def test_what_builds_from_source_is_pinned() -> None:
    assert {canonical(name) for name in (*BUILD, *SOURCES, "uv")} <= pins("constraints.txt").keys()


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        (None, 2, "nothing was looked up"),
        ([{"name": "a", "skip_reason": "not found"}], 2, "nothing was looked up"),
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 of 1 packages looked up"),
        (
            [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "no"}],
            2, "not looked up: b",
        ),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}],
            1, "a 1: CVE-1, fixed in 2",
        ),
    ],
)  # fmt: skip
def test_what_was_not_looked_up_is_no_success(
    packages: list[dict[str, Any]] | None, code: int, said: str
) -> None:
    found = judge(None if packages is None else {"dependencies": packages})
    assert found[0] == code
    assert said in "; ".join(found[1])
