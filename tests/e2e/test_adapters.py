"""Runs that train adapters: verified, audited, tampered with, stopped and resumed, joined late."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import read_log
from dilocox.record.verify.run_history import read_history
from dilocox.utils.adapter_files import ADAPTER_FILE
from tests.support.base_model import peft_folder, write_base
from tests.support.forge import Forge
from tests.support.harness import PATIENT, Run, Workshop, verdicts

MODEL = """\
[model]
path = "{base}"
[adapter]
rank = 4
dropout = 0.1
"""
SCORE = """\
def score(model, tokenizer):
    names = [name for name, _ in model.named_parameters()]
    count = sum(".lora_A." in name for name in names)
    return {"adapters": count, "peft": hasattr(model, "peft_config")}
"""
DATA = ('data.folder="{run}/data"',)


@pytest.fixture(scope="module")
def base(shared_workshop: Workshop) -> Path:
    return write_base(shared_workshop.root / "base")


def words(workshop: Workshop, base: Path, name: str, *sets: str) -> list[str]:
    """The command line of a run with adapters."""
    return workshop.run_file(name, *DATA, *sets, model=MODEL.format(base=base))


@pytest.mark.runs
def test_a_run_is_verified_audited_and_loaded_by_peft(
    workshop: Workshop, forge: Forge, base: Path, tmp_path: Path
) -> None:
    """The run starts from adapters of PEFT. A changed adapter, other first adapters and a swapped
    base model are found; the best adapters are kept."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        first = peft_folder(base, tmp_path / "first", r=4, lora_alpha=32)
    score = tmp_path / "score.py"
    score.write_text(SCORE)
    sets = (
        "outer.rounds=2", "record.states_every=1", "evaluation.every_rounds=1",
        "evaluation.patience=9", "checkpoint.best=true", f"evaluation.tasks=['{score}:score']",
        f"adapter.path={first}", PATIENT,
    )  # fmt: skip
    run = forge.command(workshop, "lora", "train", *words(workshop, base, "lora", *sets))
    assert run.wait() == 0, run.output()
    assert "parameters of adapters on" in run.printed()
    assert verdicts(run.folder) == {"audits": "NOT_RUN", "beacon": "NOT_RUN"}
    log = read_log(run.folder / "record")
    assert all(
        each["versions"]["peft"] == importlib.metadata.version("peft")
        for each in read_history(log.entries, NoteKey.parse(log.public)).enrolments
    )
    forge.audit_exact(workshop, run)

    # Checkpoints and model hold the adapters, and nothing of the base.
    folder = run.folder / "model"
    adapters = load_file(folder / ADAPTER_FILE)
    kept: set[str] = set()
    for file in (run.folder / "checkpoints").rglob("tensors.json"):
        kept |= json.loads(file.read_text())["tensors"].keys()
    live = {name.removeprefix("live/") for name in kept if name.startswith("live/")}
    assert live == adapters.keys()
    assert all(".lora_" in name for name in kept if name.startswith("inner/exp_avg"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits = loaded(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    assert not torch.allclose(logits, plain, atol=1e-3)

    # The best adapters, and a function that scores the last ones.
    lowest = min(
        (row["val_loss"], row["after_round"])
        for row in run.records("evaluation", site="paris")
        if row["after_round"] >= 0
    )
    said = json.loads((run.folder / "model-best" / "held_out.json").read_text())
    assert (said["val_loss"], said["after_round"]) == lowest
    AutoPeftModelForCausalLM.from_pretrained(run.folder / "model-best")
    assert load_file(run.folder / "model-best" / ADAPTER_FILE).keys() == adapters.keys()
    scored = run.records("tasks", site="paris")[-1]
    count = sum(".lora_A." in name for name in adapters)
    assert scored["results"] == {"score/adapters": count, "score/peft": 1.0}
    assert scored["after_round"] == 2

    # A changed adapter.
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    name = sorted(adapters)[0]
    save_file({**adapters, name: adapters[name] + 1e-6}, copied / ADAPTER_FILE)
    assert verdicts(run.folder, model=copied)["model"] == "FAIL"
    save_file(adapters, copied / ADAPTER_FILE)
    assert "model" not in verdicts(run.folder, model=copied)
    shutil.copy(base / "model.safetensors", copied / "model.safetensors")
    assert verdicts(run.folder, model=copied)["model"] == "FAIL"
    # Another base model.
    other = write_base(tmp_path / "other", seed=1)
    assert verdicts(run.folder, start=other)["base"] == "FAIL"
    assert "base" not in verdicts(run.folder, start=base)
    # Other first adapters.
    assert "start" not in verdicts(run.folder, start=base, adapters=first)
    begun = load_file(first / ADAPTER_FILE)
    save_file({**begun, name: begun[name] + 1e-6}, first / ADAPTER_FILE)
    assert verdicts(run.folder, start=base, adapters=first)["start"] == "FAIL"


@pytest.mark.slow
@pytest.mark.stops
def test_a_stop_changes_nothing_and_another_base_is_refused(
    workshop: Workshop, forge: Forge, base: Path, tmp_path: Path
) -> None:
    """Two stages whole; stopped after the first round and resumed, bit for bit. A is frozen."""
    sets = (
        "outer.rounds=24", "outer.inner_steps=4", "checkpoint.every_rounds=0",
        "adapter.freeze_a=true",
    )  # fmt: skip
    whole = forge.command(workshop, "uncut", "train", *words(workshop, base, "uncut", *sets))
    assert whole.wait() == 0, whole.output()
    arguments = words(workshop, base, "cut", *sets)
    cut = forge.command(workshop, "cut", "train", *arguments)
    cut.until_round(1)
    cut.interrupt()
    assert cut.wait() == 130, cut.output()

    kept = base.with_name("kept")
    base.rename(kept)
    write_base(base, seed=1)
    refused = forge.command(workshop, "cut", "train", *arguments, "--resume")
    assert refused.wait() == 1
    assert "was begun with" in refused.printed()
    shutil.rmtree(base)
    kept.rename(base)

    last = forge.command(workshop, "cut", "train", *arguments, "--resume")
    assert last.wait() == 0, last.output()
    assert adapters_of(last) == adapters_of(whole)
    assert last.summary()["anchor_digest"] == whole.summary()["anchor_digest"]
    assert verdicts(last.folder) == {}

    # A is not sent: it is what the seed gives.
    adapters = load_file(last.folder / "model" / ADAPTER_FILE)
    name = next(name for name in adapters if ".lora_A." in name)
    adapters[name][0, 0] += 1e-6
    shutil.copytree(last.folder / "model", tmp_path / "model")
    save_file(adapters, tmp_path / "model" / ADAPTER_FILE)
    assert verdicts(last.folder, model=tmp_path / "model") == {"model": "FAIL"}


def adapters_of(run: Run) -> bytes:
    return (run.folder / "model" / ADAPTER_FILE).read_bytes()


@pytest.mark.slow
@pytest.mark.stops
def test_a_site_that_comes_later_fetches_adapters_alone(
    workshop: Workshop, forge: Forge, base: Path
) -> None:
    arguments = words(
        workshop, base, "late", "outer.rounds=160", "checkpoint.every_rounds=0", "site.stages=1"
    )
    run = forge.command(workshop, "late", "train", *arguments)
    run.until(lambda: len(run.records("round")) >= 3)
    victims = [pid for name, pid in run.rank_processes().items() if name.startswith("lyon")]
    for process in victims:
        os.kill(process, signal.SIGKILL)
    run.until(lambda: "lyon is gone" in run.printed())
    endpoint = json.loads((run.folder / "coordinator" / "endpoint.json").read_text())
    token = run.folder / "coordinator" / "tokens" / "lyon"
    file, *overrides = arguments
    joined = forge.command(
        workshop, "late", "join", endpoint["url"].removeprefix("https://"), "--site", "lyon",
        "--run-file", file, *overrides, "--token-file", str(token),
    )  # fmt: skip
    assert joined.wait() == 0, joined.output()
    assert run.wait() == 0, run.output()
    assert run.printed().count("lyon contributes from round") == 2
    assert run.records("round")[-1]["sites"] == 2
    assert verdicts(run.folder) == {}


@pytest.mark.slow
@pytest.mark.runs
def test_a_run_on_a_base_in_four_bits_is_audited(
    workshop: Workshop, forge: Forge, base: Path
) -> None:
    """Adapters alone are published: the base that they are added to is the original one."""
    pytest.importorskip("bitsandbytes")
    sets = (
        "outer.rounds=2", "record.states_every=1", "adapter.base=nf4", "adapter.freeze_a=true",
        PATIENT,
    )  # fmt: skip
    run = forge.command(workshop, "packed", "train", *words(workshop, base, "packed", *sets))
    assert run.wait() == 0, run.output()
    assert "frozen ones in NF4" in run.printed()
    assert verdicts(run.folder) == {"audits": "NOT_RUN", "beacon": "NOT_RUN"}
    log = read_log(run.folder / "record")
    for each in read_history(log.entries, NoteKey.parse(log.public)).enrolments:
        assert each["versions"]["bitsandbytes"] == importlib.metadata.version("bitsandbytes")
    forge.audit_exact(workshop, run)
    merged = run.folder.parent / "packed-merged"
    export = forge.command(
        workshop, "packed", "export", str(run.folder), "--to", str(merged), "--merge"
    )
    assert export.wait() == 0, export.output()
    found, stored = (load_file(each / "model.safetensors") for each in (merged, base))
    adapters = load_file(run.folder / "model" / ADAPTER_FILE)
    name = "model.layers.0.mlp.up_proj"
    b, a = (adapters[f"base_model.model.{name}.lora_{each}.weight"] for each in "BA")
    product = 32.0 / 4 * b @ a
    assert product.norm() > 0.0
    assert torch.allclose(found[f"{name}.weight"], stored[f"{name}.weight"] + product, atol=1e-6)
