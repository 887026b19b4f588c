"""A run that goes on with the adapters of another run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dilocox.config.handover import MOMENTUM
from dilocox.training.portable_checkpoint import Handover
from dilocox.utils.adapter_files import ADAPTER_FILE
from tests.e2e.test_adapters import words
from tests.support.base_model import write_base
from tests.support.forge import Forge
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs


@pytest.mark.slow
def test_adapters_go_on_in_a_run_of_another_layout(
    workshop: Workshop, forge: Forge, tmp_path: Path
) -> None:
    """Both runs are verified; foreign adapters and a swapped base model are found."""
    base = write_base(workshop.root / "handover-base")

    def begun(name: str, *sets: str) -> list[str]:
        return words(
            workshop, base, name, f"model.path={base}", "adapter.dropout=0.0", PATIENT, *sets
        )

    old = forge.command(workshop, "lora-old", "train", *begun("lora-old", "outer.rounds=2"))
    assert old.wait() == 0, old.output()
    start = tmp_path / "start"
    made = forge.command(workshop, "lora-old", "handover", str(old.folder), "--to", str(start))
    assert made.wait() == 0, made.output()
    assert f'adapter.handover = "{start}"' in made.printed()
    found = Handover.read(start)
    assert found.adapters is not None
    adapters, momenta = load_file(start / ADAPTER_FILE), load_file(start / MOMENTUM)
    assert adapters.keys() == momenta.keys()
    assert all(each.dtype == torch.float32 for each in (*adapters.values(), *momenta.values()))
    assert any(bool(each.any()) for name, each in adapters.items() if ".lora_B." in name)

    sets = (
        "outer.rounds=4", "site.stages=1", "site.shards=2", f"adapter.handover={start}",
        "record.states_every=1",
    )  # fmt: skip
    other = write_base(tmp_path / "other", seed=1)
    for change, said in (
        ("adapter.rank=8", "adapter.rank: 8, but run lora-old had 4"),
        (f"model.path={other}", "but run lora-old trained its adapters on"),
    ):
        arguments = begun("lora-refused", *sets, change)
        wrong = forge.command(workshop, "lora-refused", "train", *arguments)
        assert wrong.wait() == 1, wrong.output()
        assert said in wrong.printed()

    new = forge.command(workshop, "lora-new", "train", *begun("lora-new", *sets))
    assert new.wait() == 0, new.output()
    assert found.line in new.printed()
    first, last = new.summary(), old.summary()
    assert first["val_loss_first"] < last["val_loss_first"] - 0.01
    assert new.records()[0]["step"] > found.steps
    assert new.sequences_amiss() == (0, 0)
    changed = load_file(new.folder / "model" / ADAPTER_FILE)
    assert any(not torch.equal(each, adapters[name]) for name, each in changed.items())

    # The record begins with the adapters and the momentum, on the same base model.
    assert verdicts(old.folder) == {}
    silent = {"audits": "NOT_RUN", "beacon": "NOT_RUN"}
    assert verdicts(new.folder) == silent
    assert verdicts(new.folder, start=base, adapters=start) == silent
    foreign = tmp_path / "foreign"
    shutil.copytree(start, foreign)
    name = next(name for name in adapters if ".lora_B." in name)
    save_file({**adapters, name: adapters[name] + 1e-6}, foreign / ADAPTER_FILE)
    assert verdicts(new.folder, adapters=foreign) == {"start": "FAIL", **silent}
    assert verdicts(new.folder, start=other)["base"] == "FAIL"
    start.rename(tmp_path / "gone")
    assert verdicts(new.folder)["start"] == "NOT_RUN"
    # An auditor needs the base model alone.
    forge.audit_exact(workshop, new)

    # Adapters that were changed since are not gone on from.
    foreign.rename(start)
    wrong = forge.command(workshop, "lora-foreign", "train", *begun("lora-foreign", *sets))
    assert wrong.wait() == 1
    assert f"{start / ADAPTER_FILE}: missing or changed since it was handed over" in wrong.printed()
