"""Every command of README and tutorial, as a stranger would type it (cut short by overrides)."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.harness import PATIENT, Workshop
from tests.support.page_commands import PLANS, TWO_MACHINES, plan_command

if TYPE_CHECKING:
    from tests.support.forge import ForkedRun

pytestmark = pytest.mark.runs

ROOT = Path(__file__).resolve().parents[2]
CUT = (
    "outer.rounds=3",
    "outer.inner_steps=6",
    "outer.fragments=2",
    "site.batch_size=4",
    "site.micro_batch_size=2",
    "data.sequence_length=64",
    "inner.warmup_steps=5",
    "data.validation_sequences=8",
    "data.max_documents=200",
    PATIENT,
)
"""The quickstart in a few seconds."""


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make quickstart` in a copy of the checkout, with the interpreter that runs the tests."""
    place = tmp_path_factory.mktemp("readme")
    for name in ("Makefile", "examples", "constraints.txt", "pyproject.toml", "scripts"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name)
        else:
            shutil.copy2(source, place / name)
    # The environment is there already: what its making takes is tested by every fresh CI run.
    binaries = place / "venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "dilocox").symlink_to(Path(sys.executable).with_name("dilocox"))
    (place / "venv" / ".ready").touch()
    sets = " ".join(f"--set {item}" for item in CUT)
    done = subprocess.run(
        ["make", "quickstart", "VENV=venv", f"SET={sets}"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out loss" in done.stdout
    assert "completion" in done.stdout
    return place / "runs" / "quickstart"


def test_quickstart_writes_what_the_readme_says(quickstart: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary = json.loads((quickstart / "summary.json").read_text(encoding="utf-8"))
    wanted = {
        "val_loss_first", "val_loss_last", "tokens", "tokens_per_second", "payload_bytes",
        "allreduce_bytes", "sites", "stages", "rounds", "anchor_digest",
    }  # fmt: skip
    assert wanted <= summary.keys()
    assert (summary["sites"], summary["stages"], summary["rounds"]) == (2, 2, 3)
    assert summary["val_loss_last"] < summary["val_loss_first"]
    assert (quickstart / "run.toml").exists()
    assert (quickstart / "metrics.jsonl").exists()
    assert any((quickstart / "checkpoints").iterdir())
    model, report = AutoModelForCausalLM.from_pretrained(
        quickstart / "model", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert 4e6 <= sum(p.numel() for p in model.parameters()) <= 6e6
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    ids = tokenizer("import os\n", return_tensors="pt", return_token_type_ids=False)
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=4, pad_token_id=0)[0])
    assert text.startswith("import os")


def test_generate(quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dilocox.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["generate", str(quickstart), "--prompt", "def main():", "--tokens", "8"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("def main():")


def test_verify(quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dilocox.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["verify", str(quickstart)])
    told = capsys.readouterr().out
    assert end.value.code == 0, told
    assert re.search(r"PASS +replay|replay +PASS", told), told


def test_report(quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dilocox.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["report", str(quickstart)])
    told = capsys.readouterr().out
    assert end.value.code == 0, told
    page = (quickstart / "report.html").read_text(encoding="utf-8")
    assert "<h1" in page
    assert "quickstart" in page


@pytest.mark.parametrize(
    "name",
    [
        name if name == "qwen1.5-107b" else pytest.param(name, marks=pytest.mark.slow)
        for name in PLANS
    ],
)
def test_plan(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What docs/sizes.md and the README say of a run file is what the planner prints."""
    from dilocox.cli.main import main

    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main(plan_command(name).split()[1:])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert re.search(r"^allreduce +[\d,]+", told, re.MULTILINE), told
    needs, does = table_rows("docs/sizes.md", name)
    gpu, usable = re.findall(r"[\d.]+", needs[3])
    assert f"fits: {gpu} GiB of the {usable} GiB" in told
    assert f"host memory: {needs[4]} per machine" in told
    assert f"record: {needs[5]} " in told
    steps, codec, payload, tokens, kept, loss = (cell.strip("`") for cell in does[1:])
    assert f"a round of H = {steps} inner steps" in told
    assert f"codec {codec}\n" in told
    assert f"each site sends and receives {payload}, " in told
    assert f"predicted: {tokens}, {kept.replace(' ', '')} of the same sites" in told
    assert f"predicted loss {loss.replace(' ', '')} " in told


def test_readme_has_the_sizes_of_their_page() -> None:
    """Rounded, but for the figures that are so near each other that rounding would hide it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in PLANS:
        needs, does = table_rows("docs/sizes.md", name)
        gpu, usable = (float(figure) for figure in re.findall(r"[\d.]+", needs[3]))
        near = f"{gpu} of {usable}" if usable - gpu < 5 else f"{gpu:.0f} of {usable:.0f}"
        record = re.sub(r"^(\d{3})\.\d", r"\1", needs[5])
        machine = f"{float(needs[4].split()[0]):.0f} GiB"
        told = f"| {near} GiB | {machine} | {record} | {does[5]} | {does[6]} |"
        assert told in readme


def table_rows(page: str, name: str) -> list[list[str]]:
    """The cells of the rows of a page that begin with a run file's name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(rf"\| \[?{re.escape(name)}[\] ]", line)
    ]


def test_two_real_sites(workshop: Workshop) -> None:
    """The two-site example over the printed join lines, cut to a small model."""
    cut = (
        f"run.folder={workshop.root}/two-sites",
        f"data.folder={workshop.root}/two-sites-data",
        "data.max_documents=40",
        "data.vocabulary_size=600",
        "data.sequence_length=64",
        "model.architecture.hidden_size=64",
        "model.architecture.num_hidden_layers=4",
        "model.architecture.intermediate_size=128",
        "model.architecture.head_dim=8",
        "site.batch_size=8",
        "outer.steps=24",
        "network.port=0",
        "data.validation_sequences=8",
        PATIENT,
    )
    sets = [part for item in cut for part in ("--set", item)]
    file = str(ROOT / "examples" / "two-sites.toml")
    run = workshop.forge.command(workshop, "two-sites", "coordinator", file, *sets)
    run.until(lambda: run.printed().count("dilocox join") == 2)
    assert "0.0.0.0" not in run.printed(), "an address that other machines reach"
    joins = [
        workshop.forge.command(workshop, "two-sites", *line.split())
        for line in re.findall(r"dilocox (join .*)", run.printed())
    ]
    assert [joined.wait() for joined in joins] == [0, 0], joins[0].output()
    assert run.wait() == 0, run.output()
    assert run.summary()["val_loss_last"] < run.summary()["val_loss_first"]
    assert run.summary()["steps"] == 24


@pytest.mark.slow
def test_two_machines(workshop: Workshop) -> None:
    """The commands of the tutorial's last part, in two run folders; scp and ssh are copies here."""
    of = {"paris": workshop.root / "two-machines", "lyon": workshop.root / "other" / "two-machines"}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    cut = (*CUT, "site.threads=1", f"sites.paris.ports={port}-{port}")
    words = {
        site: [
            part
            for item in (*cut, f"run.folder={folder}", "network.port=0")
            for part in ("--set", item)
        ]
        for site, folder in of.items()
    }

    def dilocox(site: str, command: str) -> ForkedRun:
        arguments = command.replace("runs/two-machines", str(of[site])).split()[1:]
        if arguments[0] in ("data", "coordinator", "join"):
            arguments += words[site]
        arguments = [
            str(ROOT / word) if word.startswith("examples/") else word for word in arguments
        ]
        return workshop.forge.command(workshop, "two-machines", *arguments)

    prepare, _, _, begin, _, lyon, paris, status, verify = TWO_MACHINES
    prepared = dilocox("paris", prepare)
    assert prepared.wait() == 0, prepared.output()
    shutil.copytree(of["paris"] / "data", of["lyon"] / "data")
    run = dilocox("paris", begin)
    run.until(lambda: run.printed().count("dilocox join") == 2)
    address = re.findall(r"dilocox join (\S+)", run.printed())[0]
    token = shutil.copy(of["paris"] / "coordinator" / "tokens" / "lyon", workshop.root / "token")
    joins = [
        dilocox("lyon", lyon.replace("HOST:29400", address).replace(" token", f" {token}")),
        dilocox("paris", paris.replace("HOST:29400", address)),
    ]
    assert [joined.wait() for joined in joins] == [0, 0], joins[0].output() + joins[1].output()
    assert run.wait() == 0, run.output()
    for command in (status, verify):
        asked = dilocox("paris", command)
        assert asked.wait() == 0, asked.output()
    assert "verified: all required claims PASS" in asked.output()
    weights = [
        {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}
        for folder in of.values()
    ]
    assert weights[0]
    assert weights[0] == weights[1]
