"""The run files of the worked examples, and one example from table to AUROC."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox.config.run_config import load_run
from dilocox.training.loop.parts import check_loop
from tests.support.base_model import write_base
from tests.support.example_scripts import EXAMPLES

pytestmark = pytest.mark.waits


@pytest.mark.parametrize(
    ("example", "form", "name"),
    [("transactions", "instruction", "transactions"), ("support-chat", "chat", "support")],
)
def test_run_files_resolve(example: str, form: str, name: str) -> None:
    config = load_run(EXAMPLES / example / "run.toml")
    assert config.data.format == form
    assert config.run.name == name
    assert config.adapter is not None
    assert list(config.sites) == ["paris", "lyon"]
    text = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
    for script in re.findall(r"examples/\S+\.(?:py|toml)", text):
        assert (EXAMPLES.parent / script).is_file()
    assert str(config.folder) in text
    assert str(config.data.validation_source) in text


@pytest.mark.parametrize("example", ["support-chat", "transactions", "trainer", "trl-lora"])
def test_readmes_install_what_their_commands_need(example: str) -> None:
    text = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^pip install (.*)$", text, re.MULTILINE)
    extras = re.findall(r'"dilocox\[([^]]*)\]"', line)
    found = {name for each in extras for name in each.split(",")}
    needed = set()
    if load_run(EXAMPLES / example / "run.toml").adapter is not None:
        needed.add("adapters")
    if re.search("^dilocox serve ", text, re.MULTILINE):
        needed.add("serve")
    assert needed <= found
    # What the conversion of the model needs; the extras hf and serve bring accelerate.
    assert "gguf" in line or "serve" in found
    assert "accelerate" in line or found & {"hf", "serve"}


def test_texts_are_read_as_utf_8_whatever_the_locale() -> None:
    scripts = sorted(EXAMPLES.rglob("*.py"))
    assert len(scripts) >= 10
    assert not [str(path) for path in scripts if "read_text()" in path.read_text(encoding="utf-8")]


def test_the_run_file_of_a_loop_of_ones_own_resolves() -> None:
    config = load_run(EXAMPLES / "own-loop" / "run.toml")
    assert config.model.own
    assert all(site.own_code for site in config.sites.values())
    lines = (EXAMPLES / "own-loop" / "gpt.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    text = (EXAMPLES / "own-loop" / "README.md").read_text(encoding="utf-8")
    assert str(config.folder) in text
    assert f"{config.total_steps} inner steps" in text


@pytest.mark.parametrize("example", ["trainer", "trl-lora"])
def test_the_run_files_of_trainers_resolve(example: str) -> None:
    config = load_run(EXAMPLES / example / "run.toml")
    check_loop(config, "paris")
    assert (config.adapter is not None) == (example == "trl-lora")
    text = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
    for named in re.findall(r"(?:examples|docs|scripts)/\S+\.(?:py|toml|md)", text):
        assert (EXAMPLES.parent / named).is_file()
    assert str(config.folder) in text
    assert f"{config.total_steps} inner steps" in text


@pytest.mark.slow
@pytest.mark.runs
def test_from_a_table_to_auroc(tmp_path: Path) -> None:
    """With a tiny model that knows nothing: the commands of the README, in a folder of its own."""
    pytest.importorskip("peft")
    place = tmp_path / "repository"
    place.mkdir()

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=place, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    here, data = EXAMPLES / "transactions", "examples/transactions/data"
    config = write_base(tmp_path / "smollm2") / "config.json"
    # A payment has about 190 tokens of this tokenizer.
    shape = json.loads(config.read_text(encoding="utf-8")) | {"max_position_embeddings": 512}
    config.write_text(json.dumps(shape), encoding="utf-8")
    run(str(here / "make_data.py"), data, "--train", "64", "--held-out", "32")
    sets = ("outer.steps=2", "data.sequence_length=256", "network.heartbeat=20")
    run("-m", "dilocox", "train", str(here / "run.toml"),
        *(part for item in sets for part in ("--set", item)))  # fmt: skip
    said = run(str(here / "score.py"), f"{data}/held-out.jsonl", "../smollm2",
               "runs/transactions").splitlines()  # fmt: skip
    assert [line.split(":")[0] for line in said[1:]] == ["../smollm2", "runs/transactions"]
    assert all(re.search(r"AUROC [01]\.\d{3} on 32 held-out payments", line) for line in said[1:])
