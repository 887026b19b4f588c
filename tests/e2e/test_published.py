"""A model that is published in bf16 and in several files: verified, exported, sampled from."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import shlex
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dilocox
from dilocox.cli import main
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.report.folder import read_run
from tests.support.harness import PATIENT, Workshop
from tests.support.secret_search import coordinator_secrets, leaks

pytestmark = pytest.mark.runs

SETS = (
    "outer.rounds=2",
    "checkpoint.every_rounds=0",
    "checkpoint.published_dtype=bf16",
    "checkpoint.published_file_size=20kB",
    PATIENT,
)


@pytest.fixture(scope="module")
def published(shared_workshop: Workshop) -> Path:
    return shared_workshop.train("published", *SETS).folder


def bad(folder: Path, model: Path | None = None) -> dict[str, str]:
    report = verify(Places(folder, model=model), lambda what, share: None)
    return {f.claim.name: f.verdict for f in report.findings if f.verdict != "PASS"}


def test_a_rounded_model_is_verified(published: Path) -> None:
    files = sorted((published / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert {t.dtype for path in files for t in load_file(path).values()} == {torch.bfloat16}
    assert json.loads((published / "model/config.json").read_text())["dtype"] == "bfloat16"
    assert bad(published) == {}
    said = read_run(published)
    assert said.parameters is not None
    assert [name for name, _ in said.model if name.endswith(".safetensors")] == [
        path.name for path in files
    ]


def test_another_weight_is_found(published: Path, tmp_path: Path) -> None:
    """One that rounds to the same bf16, too: it is not the one that was published."""
    for change in (2**-6, 2**-20):
        model = tmp_path / str(change)
        shutil.copytree(published / "model", model)
        path = sorted(model.glob("*.safetensors"))[1]
        tensors = load_file(path)
        name = sorted(tensors)[0]
        changed = tensors[name].float()
        changed.view(-1)[0] = changed.view(-1)[0] * (1 + change)
        save_file(tensors | {name: changed}, path, metadata={"format": "pt"})
        assert bad(published, model) == {"model": "FAIL"}


def test_other_commands_take_it(published: Path, tmp_path: Path) -> None:
    text = dilocox.generate(published, "def main", tokens=4, seed=1)
    assert text.startswith("def main")
    wide = dilocox.export(published, tmp_path / "wide", "fp32")
    own = {
        name: tensor
        for path in sorted((published / "model").glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    for path in wide.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, own[name].float())
    # The values are those that were signed, whatever holds them.
    index = wide / "config.json"
    shutil.copy(published / "model" / "config.json", index)
    shutil.copy(published / "model" / "model.safetensors.index.json", wide)
    assert bad(published, wide) == {}


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """A plain one, as `python -m http.server` is."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def typed(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(list(words))
    return int(ended.value.code or 0)


def test_a_run_is_gathered_from_its_places(
    published: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The coordinator's folder has no payloads and no model, and each site lacks some payloads."""
    away = shutil.ignore_patterns("store", "model", "data", "checkpoints")
    shutil.copytree(published, tmp_path / "runs" / "coordinator", ignore=away)
    run_file = tmp_path / "runs" / "coordinator" / "run.toml"
    places = re.sub(r'folder = ".*"', 'folder = "/not/here"', run_file.read_text())
    run_file.write_text(places)
    for number, site in enumerate(("paris", "lyon")):
        for path in (published / "record" / "store").rglob("*"):
            if path.is_file() and int(path.parent.name, 16) % 2 == number:
                where = tmp_path / site / path.relative_to(published)
                where.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, where)
    shutil.copytree(published / "model", tmp_path / "paris" / "model")
    shutil.copytree(published.parent / "data", tmp_path / "lyon" / "data")
    monkeypatch.chdir(tmp_path)
    line = ("publish", "runs/coordinator", "--to", "public", "--from", "paris")
    assert typed(*line) == 1
    assert "missing: the token files' manifest.json" in capsys.readouterr().err
    # A site's payloads are not there: all claims that need them are named, and nothing stays.
    shutil.move(tmp_path / "lyon" / "record", tmp_path / "kept")
    assert typed(*line, "--from", "lyon") == 1
    said = capsys.readouterr().err
    assert "payloads NOT_RUN" in said
    assert "replay NOT_RUN" in said
    assert not (tmp_path / "public").exists()
    assert typed(*line, "--from", "lyon", "--store", "kept/store") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "public"

    public = tmp_path / "public"
    assert {path.name for path in public.iterdir()} == {
        "CHECK.md", "report.html", "run.toml", "metrics.jsonl", "summary.json", "ledger.json",
        "record", "model", "data",
    }  # fmt: skip
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in public.rglob("*") if path.is_file())
    secrets = {str(path): secret for path, secret in coordinator_secrets(published).items()}
    texts = {str(path): path.read_bytes() for path in public.rglob("*") if path.is_file()}
    assert not leaks(secrets, texts)
    for name in ("CHECK.md", "report.html"):
        assert f"{tmp_path}/" not in (public / name).read_text()
    assert 'folder = "/not/here' not in (public / "run.toml").read_text()
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "paris")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert typed("verify", "../public") == 0
    with web_server(public) as url:
        assert typed("verify", url) == 0
    assert "verified: all required claims PASS" in capsys.readouterr().out
    key = next(line for line in (public / "CHECK.md").read_text().splitlines() if "--key" in line)
    monkeypatch.chdir(public)
    assert typed(*shlex.split(key)[1:]) == 0
