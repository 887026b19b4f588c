"""Options of benchmarks, and commands that they run."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import common


def test_a_command_that_fails_is_named_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(common.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(common.CommandError, match=r"dilocox train a\.toml: ended with code 3"):
        common.run_dilocox("train", "a.toml")


def test_benchmarks_that_are_never_short_have_no_option_for_it() -> None:
    assert "--quick" in common.parser("Measures.").format_help()
    assert "--quick" not in common.parser("Computes.", quick=False).format_help()
