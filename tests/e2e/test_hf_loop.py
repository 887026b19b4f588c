"""The examples with trainers of transformers and TRL, each trained at two sites and verified."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_ddp_loop import two_processes
from tests.e2e.test_operations import coordinate, flush_digests
from tests.support.base_model import write_base
from tests.support.example_scripts import EXAMPLES
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

SMALL = (
    "data.sequence_length=32", "site.batch_size=4", "site.micro_batch_size=2",
    "inner.learning_rate=3e-3", "inner.warmup_steps=4", "outer.rounds=4", "outer.inner_steps=8",
    "outer.fragments=2", "control.adapt=off", "checkpoint.every_rounds=0", PATIENT,
)  # fmt: skip
"""What makes a run of the examples small."""


def trained(
    forge: Forge, workshop: Workshop, name: str, script: list[str], data: list[Path]
) -> ForkedRun:
    """A run whose two sites are `script`, each with data of its own, to its good end."""
    file = str(Path(script[0]).with_name("run.toml"))
    base = write_base(workshop.root / f"{name}-base")
    sets = [*SMALL, f"run.name={name}", f"run.folder={workshop.folder(name)}", f"model.path={base}"]
    words = [file, *(word for item in sets for word in ("--set", item))]
    run = coordinate(forge, workshop, name, *words)
    sites = [
        forge.command(workshop, name, "python", *script, file, site, str(own), *sets)
        for site, own in zip(("paris", "lyon"), data, strict=True)
    ]
    assert [site.wait() for site in sites] == [0, 0], sites[0].printed() + sites[1].printed()
    assert run.wait() == 0, run.output()
    assert {site.last_line() for site in sites} == {"finished"}
    assert "round   0  step 8  loss" in sites[0].printed()
    assert len(flush_digests(run)) == 1
    assert verdicts(run.folder) == {"data": "NOT_RUN"}
    return run


def test_a_trainer_of_transformers(workshop: Workshop, forge: Forge) -> None:
    texts = sorted(workshop.text.iterdir(), key=lambda file: file.stat().st_size)[-2:]
    script = [str(EXAMPLES / "trainer" / "train.py")]
    run = trained(forge, workshop, "trainers", script, texts)
    reports = run.records("round", "paris")
    assert [report["tokens"] for report in reports] == [8 * 4 * 32] * 4
    assert reports[-1]["loss"] < reports[0]["loss"] - 0.5
    summary = run.summary()
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.5
    for file in ("config.json", "tokenizer.json"):
        assert (run.folder / "model" / file).exists()


@pytest.mark.slow
def test_a_trainer_of_two_processes(workshop: Workshop, forge: Forge) -> None:
    """Paris has two processes, lyon has one. Both train on what they bring."""
    texts = sorted(workshop.text.iterdir(), key=lambda file: file.stat().st_size)[-2:]
    file, script = (str(EXAMPLES / "trainer" / name) for name in ("run.toml", "train.py"))
    base = write_base(workshop.root / "several-base")
    sets = [*SMALL, "run.name=several", f"run.folder={workshop.folder('several')}"]
    sets += [f"model.path={base}", "outer.rounds=2"]
    words = [file, *(word for item in sets for word in ("--set", item))]
    run = coordinate(forge, workshop, "several", *words)
    begin = [script, file, "paris", str(texts[0]), *sets]
    paris = two_processes(forge, workshop, "several", begin)
    lyon = forge.command(workshop, "several", "python", script, file, "lyon", str(texts[1]), *sets)
    sites = [*paris, lyon]
    assert [site.wait() for site in sites] == [0, 0, 0], [site.printed() for site in sites]
    assert run.wait() == 0, run.output()
    assert {site.last_line() for site in sites} == {"finished"}
    assert len(flush_digests(run)) == 1
    assert verdicts(run.folder) == {"data": "NOT_RUN"}
    tokens = [{r["tokens"] for r in run.records("round", site)} for site in ("paris", "lyon")]
    assert tokens == [{2 * 8 * 4 * 32}, {8 * 4 * 32}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_trains_adapters(workshop: Workshop, forge: Forge, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("trl")
    records = [tmp_path / f"{site}.jsonl" for site in ("paris", "lyon")]
    for own in records:
        make = [sys.executable, str(EXAMPLES / "trl-lora" / "make_data.py"), str(own), own.stem]
        subprocess.run(make, check=True)
    script = [str(EXAMPLES / "trl-lora" / "train.py"), kind]
    run = trained(forge, workshop, kind, script, records)
    reports = run.records("round", "paris")
    assert reports[-1]["loss"] < reports[0]["loss"]
    assert (run.folder / "model" / "adapter_model.safetensors").exists()
