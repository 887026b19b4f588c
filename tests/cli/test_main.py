"""The command line: one line per error, exit codes, help with examples."""

from __future__ import annotations

import errno
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from dilocox import api
from dilocox.cli import main
from dilocox.data import prepare
from dilocox.errors import TrainingError
from dilocox.training.launch import coordinator_process, preflight
from dilocox.version import __version__
from tests.data.chats import chat_section, talks

pytestmark = pytest.mark.waits

RUN = """\
[model.architecture]
model_type = "qwen3"
[sites.paris]
"""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN, encoding="utf-8")
    return path


def test_help_has_examples_of_every_command(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    named = set(re.findall(r"^    (\w+)(?: |$)", out, flags=re.MULTILINE))
    shown = set(re.findall(r"^  dilocox (\w+)", out, flags=re.MULTILINE))
    assert named == shown == {
        "train", "coordinator", "join", "leave", "verify", "lab", "plan", "data", "export",
        "generate", "evaluate", "report", "audit", "auditor", "handover", "status", "publish",
        "chain", "serve", "witness", "availability", "attest",
    }  # fmt: skip


def test_the_examples_are_commands_that_the_parser_takes() -> None:
    for line in main.EXAMPLES.splitlines()[1:]:
        words = shlex.split(line.split("   (")[0])
        assert words[0] == "dilocox"
        options = main._parser().parse_args(words[1:])
        assert callable(options.call)


def test_a_model_is_sampled_on_the_device_that_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    def generate(model: Path, prompt: str, **options: Any) -> str:
        given.update(options)
        return f"{prompt} and more"

    monkeypatch.setattr(api, "generate", generate)
    words = ("generate", tmp_path, "--prompt", "a", "--temperature", 0, "--device", "cuda:1")
    assert command(*words) == (0, "a and more\n", "")
    assert given == {
        "chat": False,
        "tokens": 100,
        "temperature": 0.0,
        "seed": 0,
        "device": "cuda:1",
    }


@pytest.mark.parametrize("name", ["plan", "train", "coordinator", "join", "export", "generate"])
def test_every_command_has_help(command: Command, name: str) -> None:
    code, out, _ = command(name, "--help")
    assert code == 0
    assert "--debug" in out


def test_without_a_command_help_is_shown(command: Command) -> None:
    code, out, _ = command()
    assert code == 2
    assert "examples:" in out


def test_the_version(command: Command) -> None:
    assert command("--version") == (0, f"dilocox {__version__}\n", "")


def test_python_m_dilocox_works_and_help_needs_no_torch(tmp_path: Path) -> None:
    script = "import runpy, sys\nsys.argv = ['dilocox', '--help']\n"
    script += "try:\n    runpy.run_module('dilocox', run_name='__main__')\n"
    script += "finally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert answer.returncode == 0
    assert answer.stdout.startswith("usage: dilocox")
    assert answer.stderr == "False\n"


def test_where_no_model_is_nothing_is_loaded_to_sample_from_it(tmp_path: Path) -> None:
    """`dilocox generate FOLDER` answers at once: torch and transformers take seconds."""
    script = "import runpy, sys\nsys.argv = ['dilocox', 'generate', 'nothing']\n"
    script += "try:\n    runpy.run_module('dilocox', run_name='__main__')\n"
    script += "finally:\n    print({'torch', 'transformers'} & set(sys.modules))\n"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert answer.returncode == 1
    assert answer.stdout == "set()\n"
    assert answer.stderr.startswith("dilocox: nothing: no model is here; a run writes it to")


def test_an_error_is_one_line(command: Command, tmp_path: Path) -> None:
    code, out, err = command("train", tmp_path / "none.toml")
    assert (code, out) == (1, "")
    path = tmp_path / "none.toml"
    assert err == f"dilocox: {path}: no such run file; see examples/ for ones that work\n"


def test_debug_shows_the_traceback_too(command: Command, tmp_path: Path) -> None:
    code, _, err = command("train", tmp_path / "none.toml", "--debug")
    assert code == 1
    assert err.startswith("Traceback (most recent call last)")
    assert err.splitlines()[-1].startswith("dilocox: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "site.stage=2"], 'site.stage: no such key; did you mean "stages"?'),
        (["--set", "outer.rounds"], "--set 'outer.rounds': write it as section.key=value"),
        (["--set", "site.batch_size=3"], "site.batch_size 3 is not divisible into micro-batches"),
    ],
)
@pytest.mark.parametrize("name", ["plan", "train", "coordinator", "data prepare"])
def test_bad_input_is_refused_by_every_command_that_reads_a_run_file(
    command: Command, run_file: Path, name: str, arguments: list[str], expected: str
) -> None:
    code, out, err = command(*name.split(), run_file, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("dilocox: ")
    assert expected in err
    assert err.count("\n") == 1
    assert [entry.name for entry in run_file.parent.iterdir()] == ["run.toml"]


def test_join_refuses_before_it_connects(command: Command, run_file: Path) -> None:
    common = ["--run-file", run_file, "--token-file", run_file]
    code, _, err = command("join", "127.0.0.1:1", "--site", "oslo", *common)
    assert (code, err) == (1, "dilocox: site 'oslo': not in the run file, which names: paris\n")
    code, _, err = command("join", "nowhere", "--site", "paris", *common)
    assert (code, err.count("\n")) == (1, 1)
    assert "not an address; write it as HOST:PORT" in err


def test_join_refuses_what_is_no_token_before_it_prepares_text(
    command: Command, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "prepare", _fail(TrainingError("text is prepared")))
    words = ["join", "127.0.0.1:1", "--site", "paris", "--run-file", run_file]
    code, _, err = command(*words, "--token-file", run_file)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("dilocox: token: not a join token; copy coordinator/tokens/SITE")


def test_other_commands_say_what_is_missing(command: Command, tmp_path: Path) -> None:
    for arguments in (
        ["data", "show", tmp_path],
        ["export", tmp_path, "--to", tmp_path / "out"],
        ["generate", tmp_path],
    ):
        code, out, err = command(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"dilocox: {tmp_path}: no ")


def _fail(error: BaseException) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise error

    return call


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(
    command: Command, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "train", _fail(RuntimeError("wires\ncrossed")))
    code, _, err = command("train", run_file)
    assert (code, err) == (
        1,
        "dilocox: unexpected RuntimeError: wires crossed; --debug shows where\n",
    )
    _, _, err = command("train", run_file, "--debug")
    assert err.startswith("Traceback")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/runs/a"),
            "/runs/a: cannot be used (Permission denied); give this user the right to it, or name "
            "another place",
        ),
        (
            NotADirectoryError(errno.ENOTDIR, "Not a directory", b"file/run.toml"),
            "file/run.toml: cannot be used (Not a directory); a part of its path is a file, so "
            "name another place",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "a file cannot be written (No space left on device); free disk space",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_mend(
    command: Command, run_file: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, line: str
) -> None:
    monkeypatch.setattr(api, "train", _fail(error))
    assert command("train", run_file) == (1, "", f"dilocox: {line}\n")
    assert command("train", run_file, "--debug")[2].startswith("Traceback")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error", "/runs/a"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError("no number"),
    ],
)
def test_other_errors_of_the_system_are_unexpected(
    command: Command, run_file: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    monkeypatch.setattr(api, "train", _fail(error))
    assert command("train", run_file)[2].startswith("dilocox: unexpected ")


def test_a_name_that_is_too_long(command: Command) -> None:
    place = "n" * 300
    assert command("status", place) == (
        1, "", f"dilocox: {place}: cannot be used (File name too long); name a shorter one\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "No such file or directory"),
        ("folder", "Is a directory"),
        ("text", "not a signed note"),
        ("bytes", "not a text"),
    ],
)
def test_a_kept_checkpoint_that_is_none_is_no_fault_of_the_log(
    command: Command, tmp_path: Path, name: str, reason: str
) -> None:
    """A mistyped name must not look like a log that was rewritten."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("hello\n", encoding="utf-8")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    code, out, err = command("verify", tmp_path, "--seen", tmp_path / name)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"dilocox: --seen {tmp_path / name}: is not a checkpoint ({reason}")


def test_ctrl_c_before_a_run_has_begun(
    command: Command, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "train", _fail(KeyboardInterrupt()))
    assert command("train", run_file)[0] == 130


@pytest.mark.parametrize(
    ("finished", "stopped", "code"), [(True, False, 0), (False, True, 130), (False, False, 1)]
)
def test_exit_codes_of_a_run(
    command: Command,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: bool,
    stopped: bool,
    code: int,
) -> None:
    seen: dict[str, Any] = {}

    def train(config: Any, **options: Any) -> SimpleNamespace:
        seen.update(options, rounds=config.outer.rounds)
        return SimpleNamespace(finished=finished, stopped=stopped)

    monkeypatch.setattr(api, "train", train)
    assert command("train", run_file, "--set", "outer.rounds=3", "--resume")[0] == code
    assert seen == {"rounds": 3, "resume": True, "overwrite": False, "debug": False, "trace": False}


def test_a_coordinator_that_fails_says_why(
    command: Command, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = TrainingError("network.port 80: taken")
    monkeypatch.setattr(coordinator_process, "coordinate", _fail(error))
    assert command("coordinator", run_file) == (1, "", "dilocox: network.port 80: taken\n")


def test_one_document_is_shown(command: Command, tmp_path: Path) -> None:
    prepare(chat_section(tmp_path, talks()), tmp_path / "data", seed=0)
    code, out, _ = command("data", "show", tmp_path / "data", "--example", 1)
    assert code == 0
    assert out.startswith("document 1 of ")
    assert "<|im_start|>assistant\n[[It is" in out
    code, _, error = command("data", "show", tmp_path / "data", "--example", 99)
    assert code == 1
    assert "no document 99; give a number from 0 to" in error
    (tmp_path / "run.toml").touch()
    code, _, error = command("data", "show", tmp_path, "--example", 1)
    assert "--verify and --example are for a folder of token files" in error
