"""A released folder: its card, its data's description, and its signature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.report_runs import RUN_FILE, usual, write_run

from dilocox.cli.main import main
from dilocox.errors import CheckpointError, ConfigError, RecordError
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.release_signature import SIGNATURE, check_release
from dilocox.tools.release.card import Terms, card
from dilocox.tools.release.release import release
from dilocox.tools.release.signature import fingerprint, signing_key
from dilocox.tools.report.folder import read_run
from dilocox.tools.report.page import build

pytestmark = pytest.mark.waits


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run's folder with a model of one tensor."""
    folder = write_run(tmp_path / "toy", usual())
    (folder / "coordinator").mkdir()
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "toy"}')
    save_file({"a": np.arange(6, dtype=np.float32)}, model / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_parameters": 6, "total_size": 24},
             "weight_map": {"a": "model-00001-of-00001.safetensors"}}  # fmt: skip
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def accepted(folder: Path, key: Path) -> bool:
    """What the signature's own tool says, in a process of its own."""
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "model_signing", "verify", "key", str(folder), "--signature",
         str(folder / "model.sig"), "--public_key", str(key)],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    return done.returncode == 0


def test_a_release_is_signed_and_its_own_tool_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    to = tmp_path / "out" / "toy-model"
    with pytest.raises(SystemExit) as end:
        main(["export", str(run), "--release", str(to), "--licence", "apache-2.0"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "licence of the weights" not in said
    assert said.splitlines()[-1].startswith(str(to))
    public = to.with_name("toy-model.pub")
    assert {path.name for path in to.iterdir()} == {
        *(path.name for path in (run / "model").iterdir()), "README.md", "model.sig",
    }  # fmt: skip
    assert (run / "coordinator" / "release-key.pem").stat().st_mode & 0o777 == 0o600
    assert accepted(to, public)
    text = (to / "README.md").read_text()
    assert 'license: "apache-2.0"' in text
    (to / "README.md").write_text(text.replace("3.5000", "3.4000"))
    assert not accepted(to, public)


def test_a_changed_weight_and_another_key_are_refused(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    made = release(run, tmp_path / "bf16", dtype="bf16", key=tmp_path / "own.pem")
    # A web server of another user can serve all of it, and nobody is told to install a package
    # of this name, which anybody may register.
    assert {path.stat().st_mode & 0o777 for path in made.folder.iterdir()} == {0o644}
    assert "pip install dilocox" not in (made.folder / "README.md").read_text()
    assert made.unknown[-1] == "licence of the weights: not stated (--licence)"
    assert json.loads((made.folder / "config.json").read_text())["dtype"] == "bfloat16"
    other = release(run, tmp_path / "again", key=tmp_path / "other.pem")
    assert {path.stat().st_mode & 0o777 for path in other.folder.iterdir()} == {0o644}
    assert accepted(made.folder, made.public_key)
    assert not accepted(made.folder, other.public_key)
    weights = made.folder / "model-00001-of-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert not accepted(made.folder, made.public_key)


def test_the_signature_is_judged_as_its_own_tool_does(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    made = release(run, tmp_path / "toy-model", key=tmp_path / "own.pem")
    other = release(run, tmp_path / "again", key=tmp_path / "other.pem")
    key = fingerprint(signing_key(tmp_path / "own.pem"))
    assert (
        check_release(made.folder, made.public_key) == f"all files of {made.folder}, by key {key}"
    )
    assert check_release(made.folder, None).endswith("compare it with its owner's")
    with pytest.raises(RecordError, match="not what key"):
        check_release(made.folder, other.public_key)
    for name in ("README.md", "config.json", "model-00001-of-00001.safetensors", SIGNATURE):
        before = (made.folder / name).read_bytes()
        (made.folder / name).write_bytes(before[:-9] + bytes([before[-9] ^ 1]) + before[-8:])
        with pytest.raises(RecordError, match="not what key"):
            check_release(made.folder, made.public_key)
        (made.folder / name).write_bytes(before)
    (made.folder / "modeling.py").write_text("import os")
    with pytest.raises(RecordError, match=r"modeling\.py"):
        check_release(made.folder, made.public_key)
    (made.folder / "modeling.py").unlink()
    assert check_release(made.folder, made.public_key)
    (tmp_path / "no-key.pub").write_text("nonsense")
    for told, reason in ((tmp_path / "no-key.pub", "no public key"), (tmp_path / "x", "not there")):
        with pytest.raises(NotRunError, match=reason):
            check_release(made.folder, told)
    with pytest.raises(NotRunError, match="the folder is not signed"):
        check_release(run / "model", made.public_key)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(NotRunError, match="pip install"):
        check_release(made.folder, made.public_key)


@pytest.mark.parametrize("at", [".", "toy-model", "elsewhere"])
def test_the_documented_check_holds_from_any_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    at: str,
) -> None:  # fmt: skip
    """`dilocox verify RUN --model quickstart-model --release-key quickstart-model.pub`."""
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    release(run.relative_to(tmp_path), Path("toy-model"), key=Path("own.pem"))
    monkeypatch.chdir(at)
    model, key = (os.path.relpath(tmp_path / name) for name in ("toy-model", "toy-model.pub"))
    assert check_release(Path(model), Path(key)).startswith(f"all files of {Path(model)}, by key")
    assert check_release(Path(model), None).startswith(f"all files of {Path(model)}, by key")


def test_what_cannot_be_released_is_said(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        release(run, tmp_path / "full")
    (tmp_path / "rsa.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match="no usable private key"):
        release(run, tmp_path / "to", key=tmp_path / "rsa.pem")
    (run / "coordinator" / "release-key.pem").unlink()
    (run / "coordinator").rmdir()
    with pytest.raises(ConfigError, match="--signing-key"):
        release(run, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    assert signing_key(tmp_path / "new.pem").curve.name == "secp256r1"


def test_the_card_says_what_is_known_and_nothing_else(run: Path) -> None:
    (run / "run.toml").write_text(RUN_FILE.replace("some/model", "a|b <script>"))
    files = read_run(run)
    text = card(build(files, 0.0), files, Terms("bf16", None, "ab" * 32))
    assert "license:" not in text
    assert "base_model" not in text
    assert "Nobody has stated a licence" in text
    assert "so the training text is unknown" in text
    assert "cannot be verified" in text
    assert "<script>" not in text
    assert "a\\|b \\<script\\>" in text
    assert "| Held-out loss | 3.5000 | from 6.0000 before training |" in text
    assert "| outer.inner\\_steps | 20 |" in text
    assert text.startswith("---\nlibrary_name: transformers\n")


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/models/qwen-sft", "qwen-sft"),
        ("./models/x/qwen-sft/", "qwen-sft"),
        ("C:\\models\\qwen-sft", "qwen-sft"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gpt2", "gpt2"),
    ],
)
def test_a_card_names_no_place_of_one_machine(run: Path, path: str, shown: str) -> None:
    text = (run / "run.toml").read_text().replace('"some/model"', json.dumps(path))
    (run / "run.toml").write_text(text)
    files = read_run(run)
    page = build(files, 0.0)
    assert page.lead.startswith(f"{shown} of 6 parameters on 2 sites")
    said = card(page, files, Terms("fp32", None, "ab" * 32))
    assert path == shown or path not in said


def test_a_card_names_no_place_of_a_handover(run: Path) -> None:
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(f'{text}[adapter]\nrank = 4\nhandover = "/home/me/runs/start"\n')
    files = read_run(run)
    said = card(build(files, 0.0), files, Terms("fp32", None, "ab" * 32))
    assert "| handover | start |" in said
    assert "/home/me" not in said


def test_a_card_names_the_model_that_the_run_began_from(run: Path, tmp_path: Path) -> None:
    def front(path: str) -> str:
        run_file = RUN_FILE.replace('"some/model"', f"{json.dumps(path)}\npretrained = true")
        (run / "run.toml").write_text(run_file)
        files = read_run(run)
        return card(build(files, 0.0), files, Terms("fp32", None, "ab" * 32)).split("---")[1]

    base = tmp_path / "base"
    base.mkdir()
    assert 'base_model: "Qwen/Qwen3-0.6B"' in front("Qwen/Qwen3-0.6B")
    assert "base_model" not in front(str(base))
    for named, shown in (("Qwen/Qwen3-0.6B", True), ("/home/me/x", False), (None, False)):
        (base / "config.json").write_text(json.dumps({"_name_or_path": named}))
        assert ('base_model: "Qwen/Qwen3-0.6B"' in front(str(base))) is shown
    (base / "config.json").write_text("[]")
    assert "base_model" not in front(str(base))


def test_a_card_says_what_the_rounds_really_had(run: Path) -> None:
    plans = [
        {"kind": "plan", "round": 0, "slots": 4, "inner_steps": 20, "codec": "int4+moments"},
        {"kind": "plan", "round": 2, "slots": 4, "inner_steps": 5, "codec": "none+moments"},
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(plan) + "\n" for plan in plans)
    files = read_run(run)
    text = card(build(files, 0.0), files, Terms("fp32", None, "ab" * 32))
    assert (
        "| outer.inner\\_steps | first 20, last 5 (chosen for the link; the run file begins "
        "with 20) |" in text
    )
    assert "| compression.codec | first int4+moments, last none+moments (chosen" in text
    assert "| outer.method | dilocox |" in text


def test_a_coordinator_without_the_model_is_told_where_it_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dilocox report RUN --model SITE/model`, `dilocox export RUN --model SITE/model --to DIR`."""
    model = (run / "model").rename(tmp_path / "at-lyon")
    summary = {**json.loads((run / "summary.json").read_text()), "phase": "finished"}
    (run / "summary.json").write_text(json.dumps(summary))

    def typed(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    code, said = typed("report", str(run))
    assert code == 0
    assert "give its folder with --model" in said
    assert "not published yet" not in said
    code, said = typed("report", str(run), "--model", str(model))
    assert (code, "model:" in said) == (0, False)
    assert "model-00001-of-00001.safetensors" in (run / "report.html").read_text()
    assert typed("export", str(run), "--to", str(tmp_path / "none"))[0] == 1
    code, _ = typed("export", str(run), "--model", str(model), "--to", str(tmp_path / "copy"))
    assert code == 0
    assert (tmp_path / "copy" / "config.json").is_file()
    code, said = typed("report", str(run), "--store", "x")
    assert (code, "--store needs --verify" in said) == (1, True)
