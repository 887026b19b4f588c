"""The public run: its small form, and the whole of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import npm_packages

from tests.support.example_scripts import EXAMPLES, script

pytestmark = pytest.mark.runs

SCRIPT = str(EXAMPLES / "public-run" / "public_run.py")


def told(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Run the example; its facts, and what it has printed."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--folder", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "public" / "facts.json").read_text(encoding="utf-8")), done.stdout


def verdicts(facts: dict[str, Any]) -> dict[str, str]:
    """Verdicts that are not PASS, by claim."""
    found = facts["verdicts"]["claims"]
    return {each["name"]: each["verdict"] for each in found if each["verdict"] != "PASS"}


def test_the_small_form(tmp_path: Path) -> None:
    sets = ("outer.rounds=4", "outer.inner_steps=6", "record.audit_rate=1.0")
    words = [word for item in sets for word in ("--set", item)]
    facts, _ = told(tmp_path / "run", "--small", *words)
    assert verdicts(facts) == {"data": "NOT_RUN", "beacon": "NOT_RUN"}
    page = (tmp_path / "run" / "public" / "index.md").read_text(encoding="utf-8")
    for heading in ("Verdicts", "Convergence", "Text", "Members", "Audits", "Costs"):
        assert f"## {heading}" in page
    assert "PSF-2.0" in page
    assert "| lyon | EXACT |" in page
    assert page.count("| 3 | 24 |") == 1
    assert (tmp_path / "run" / "public" / "report.html").exists()


def test_without_a_network_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Path:
        raise npm_packages.PackageError("https://registry: is the registry of npm reachable?")

    monkeypatch.syspath_prepend(str(EXAMPLES / "public-run"))
    monkeypatch.setattr(npm_packages, "anvil", refuse)
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--folder", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as told:
        script("public-run", "public_run").main()
    assert str(told.value) == (
        "public_run: https://registry: is the registry of npm reachable?; --small needs no chain"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path) -> None:
    for needed in ("web3", "s3fs", "moto", "dcap_qvl", "gguf"):
        pytest.importorskip(needed)
    facts, said = told(tmp_path / "run")
    assert verdicts(facts) == {
        "audits": "FAIL", "data": "NOT_RUN", "beacon": "NOT_RUN", "attestations": "SIMULATED",
    }  # fmt: skip
    (audits,) = (each for each in facts["verdicts"]["claims"] if each["name"] == "audits")
    assert "oslo" in audits["reason"]
    assert "slashed" in facts["dispute"]
    paid = {each["site"]: int(each["wei"]) for each in facts["account"]["sites"]}
    # Rome came late, and oslo is not paid for the rounds that an auditor repeated.
    assert paid["paris"] == paid["lyon"] > max(paid["oslo"], paid["rome"])
    assert min(paid.values()) > 0
    assert "staked, 2 coins" in (tmp_path / "run" / "logs" / "paris.log").read_text()
    page = (tmp_path / "run" / "public" / "index.md").read_text(encoding="utf-8")
    assert "## Payments" in page
    assert "this run costs" in page
    assert said.rstrip().splitlines()[-1], "the model has answered"
