"""Preference training: a run learns which answer is better; it is verified, audited and resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dilocox.data import TokenFiles
from tests.data.chats import write_records
from tests.data.conftest import story
from tests.e2e.test_adapters import words
from tests.support.base_model import write_base
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import PATIENT, Workshop, verdicts

FULL = '\n[model]\npath = "{base}"\n[preference]\nbeta = 0.5\n'
SETS = (
    "data.format=preference", 'data.folder="{run}/data"', "data.sequence_length=96",
    "data.validation_fraction=0.2", "outer.rounds=2", "evaluation.every_rounds=1",
    "record.states_every=1", "inner.learning_rate=1e-3", PATIENT,
)  # fmt: skip


def write_pairs(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    records = [
        {"prompt": f"Number {n}: ", "chosen": story(n, 3), "rejected": f"self {n} return value"}
        for n in range(80)
    ]
    return write_records(folder / "pairs.jsonl", records)


@pytest.mark.runs
def test_a_run_learns_which_answer_is_better(workshop: Workshop, forge: Forge) -> None:
    base = write_base(workshop.root / "preference-base")
    source = write_pairs(workshop.root / "preference-text")
    model = FULL.format(base=base)
    args = workshop.run_file("preference", *SETS, f"data.source={source}", model=model)
    run = forge.command(workshop, "preference", "train", *args)
    assert run.wait() == 0, run.output()
    summary = run.summary()
    # At the start, model and reference are equal, so every margin is 0.
    assert summary["val_loss_first"] == pytest.approx(math.log(2), abs=1e-5)
    assert summary["val_loss_last"] < 0.6
    assert summary["val_accuracy_last"] > 0.9
    assert summary["val_margin_last"] > 0.1 > 1e-4 > abs(summary["val_margin_first"])
    files = TokenFiles.open(run.folder / "data")
    rounds = run.records("round", "paris")
    assert 0 < rounds[0]["labels"] < rounds[0]["tokens"] / 8
    assert files.content["reference"]["precision"] == "float32"
    assert verdicts(run.folder) == {"audits": "NOT_RUN", "beacon": "NOT_RUN"}
    forge.audit_exact(workshop, run)


@pytest.mark.stops
@pytest.mark.slow
def test_adapters_learn_it_and_resume(workshop: Workshop, forge: Forge) -> None:
    base = write_base(workshop.root / "preference-base-lora")
    source = write_pairs(workshop.root / "preference-text-lora")
    sets = (*SETS[:4], *SETS[5:-1], f"data.source={source}", "outer.rounds=12",
            "adapter.dropout=0.0", "site.replicas=2", "site.batch_size=8",
            "network.heartbeat=5", "checkpoint.every_rounds=0")  # fmt: skip

    def begun(name: str, *flags: str) -> ForkedRun:
        return forge.command(workshop, name, "train", *words(workshop, base, name, *sets), *flags)

    whole = begun("preference-whole")
    assert whole.wait() == 0, whole.output()
    cut = begun("preference-cut")
    cut.until_round(2)
    cut.interrupt()
    assert cut.wait() == 130, cut.output()
    again = begun("preference-cut", "--resume")
    assert again.wait() == 0, again.output()
    first, last = whole.summary(), again.summary()
    assert first["val_loss_first"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["val_loss_last"] == last["val_loss_last"] < math.log(2)
    names = ["adapter_model.safetensors"]
    for name in names:
        assert (whole.folder / "model" / name).read_bytes() == (
            again.folder / "model" / name
        ).read_bytes()
    forge.audit_exact(workshop, again)
