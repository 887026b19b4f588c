"""The virtual environment that the Makefile uses."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import setup_venv

DEBIAN = """\
The virtual environment was not created successfully because ensurepip is not
available.  On Debian/Ubuntu systems, you need to install the python3-venv
package using the following command."""
"""What Python of Debian says without that package."""


def test_an_environment_that_was_begun_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "venv"
    # What Ctrl-C leaves, or a Python without ensurepip. To make pip here would take seconds.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    real, stand_in = sys.executable, tmp_path / "python3"
    stand_in.write_text(f'#!/bin/sh\nexec {real} "$@" --without-pip\n')
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    (folder / "rest").write_text("")
    assert setup_venv.make_environment(folder) == folder / "bin" / "python"
    assert (folder / "bin" / "python").exists()
    assert not (folder / "rest").exists()


def test_an_environment_with_pip_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    (tmp_path / "pyvenv.cfg").write_text("")
    python.write_text('#!/bin/sh\n[ "$*" = "-m pip --version" ]\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert setup_venv.make_environment(tmp_path) == python


def test_a_folder_that_is_no_environment_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_text("")
    monkeypatch.setattr(sys, "executable", "/bin/true")
    setup_venv.make_environment(tmp_path)
    assert (tmp_path / "kept").exists()


def test_a_python_without_venv_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\ncat << END\n{DEBIAN}\nEND\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SystemExit) as told:
        setup_venv.make_environment(tmp_path / "venv")
    said = str(told.value)
    assert said.startswith(
        f"setup: {tmp_path / 'venv'} cannot be made (The virtual environment was"
    )
    assert said.endswith("in the package python3-venv")
    assert "\n" not in said


def test_the_environment_that_runs_the_script_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyvenv.cfg").write_text("")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(SystemExit, match="run it by another Python"):
        setup_venv.make_environment(tmp_path)


@pytest.mark.parametrize("answers", [True, False])
def test_why_the_default_index_is_taken_is_said(
    answers: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[str, ...]] = []

    class Pip(setup_venv.Pip):
        def install(self, *words: str, constrained: bool = True) -> bool:
            asked.append(words)
            return len(asked) > answers

    constraints = setup_venv.ROOT / "constraints.txt"
    monkeypatch.delenv(setup_venv.VARIABLE, raising=False)
    monkeypatch.setattr(setup_venv, "ask_nvidia_smi", lambda: (None, ""))
    monkeypatch.setattr(setup_venv, "reachable", lambda _: answers)
    no_torch = tmp_path / "python"
    no_torch.symlink_to("/bin/false")
    pip = Pip(no_torch, tmp_path / "log", constraints)
    setup_venv.install_torch(no_torch, pip, tmp_path)
    said = capsys.readouterr().out
    cpu = "https://download.pytorch.org/whl/cpu"
    reason = (
        f"pip cannot install it from {cpu} ({pip.log})" if answers else f"{cpu} does not answer"
    )
    assert f"setup: {reason}; taking the default index\n" in said
    assert len(asked) == 1 + answers


def test_a_proxy_that_is_written_wrongly_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://proxy:port")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # urllib keeps the opener of its first request, and with it the proxies of that moment.
    monkeypatch.setattr(urllib.request, "_opener", None)
    assert not setup_venv.reachable("https://download.pytorch.org/whl/cpu/torch/")


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> setup_venv.Pip:
    """An environment whose Python knows pip's settings, else writes down what it is asked for."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$3" = config ] && exec {shlex.quote(sys.executable)} "$@"\n'
        'echo "$SSL_CERT_FILE $UV_DEFAULT_INDEX" "$@"\n'
    )
    python.chmod(0o755)
    return setup_venv.Pip(python, tmp_path / "log", setup_venv.ROOT / "constraints.txt")


def test_uv_is_told_the_settings_of_pip(
    spy: setup_venv.Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text(
        "[install]\ncert = /file.pem\n[global]\nindex-url = https://file/simple\n"
        "cert = /other.pem\nfind-links = /one\nconstraint = /other.txt\nretries = 9\n"
        "[download]\nproxy = http://proxy\n"
    )
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@variable/simple")
    assert spy.install_by_uv("one")
    said = (tmp_path / "log").read_text().splitlines()[-1]
    assert said.startswith("/file.pem https://me:secret@variable/simple -m uv ")
    assert said.endswith(f" -c {spy.constraints} -c /other.txt one")
    assert "secret" not in said.partition(" -m ")[2], "other users see arguments"


@pytest.mark.parametrize("setting", ["no-index = true", "proxy = http://proxy", "only-binary = x"])
def test_pip_installs_where_uv_would_break_its_settings(
    spy: setup_venv.Pip, tmp_path: Path, setting: str
) -> None:
    (tmp_path / "pip.conf").write_text(f"[global]\n{setting}\n")
    assert not spy.install_by_uv("one")
    assert (tmp_path / "log").read_text() == ""


def test_pip_installs_beside_packages_of_the_system(spy: setup_venv.Pip, tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    assert spy.install_by_uv("one")
    (tmp_path / "pyvenv.cfg").write_text("home = /usr\ninclude-system-site-packages = true\n")
    assert not spy.install_by_uv("one")


@pytest.mark.parametrize("wheels", [True, False])
def test_pip_installs_what_uv_cannot(
    wheels: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    class Pip(setup_venv.Pip):
        def install(self, *words: str, constrained: bool = True) -> bool:
            asked.append(words)
            return "--only-binary" not in words or wheels

        def install_by_uv(self, *words: str) -> bool:
            return False

    setup_venv.install_itself(Pip(tmp_path, tmp_path / "log", tmp_path), "[dev]")
    assert "uv does not install it here" in capsys.readouterr().out
    assert [words[-1] for words in asked[1:]] == [f"{setup_venv.ROOT}[dev]"] * (2 - wheels)
