"""Where the join token comes from, and that no error shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.errors import JoinError
from dilocox.training.launch.join_token import VARIABLE, read_token

pytestmark = pytest.mark.waits

SECRET = "dilocox1-" + "a" * 64 + "-" + "b" * 32


def never(prompt: str) -> str:
    raise AssertionError("nobody is to be asked")


def test_file_before_environment_before_prompt(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {SECRET}\n")
    assert read_token(file, {VARIABLE: "other"}, never) == SECRET
    assert read_token(None, {VARIABLE: f"{SECRET}\n"}, never) == SECRET
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return f"{SECRET} "

    assert read_token(None, {}, ask) == SECRET
    assert prompts == ["join token: "]


def test_refusals_name_the_mend_and_hide_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JoinError, match=r"none: cannot be read .No such file.*coordinator/token"):
        read_token(tmp_path / "none", {}, never)
    with pytest.raises(JoinError, match="every user of this machine can read it") as caught:
        read_token(Path(SECRET), {}, never)
    assert "a" * 8 not in str(caught.value)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(JoinError, match=f"--token-file FILE .*, set {VARIABLE}, or start this at"):
        read_token(None, {})
