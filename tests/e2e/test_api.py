"""The Python API in a script: own dataset, loss and callback, sinks, export, sampling."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dilocox.data import TokenFiles
from dilocox.outer.layout import Layout, split_pieces
from dilocox.training.checkpoint_io import load
from dilocox.training.run_model import load_model
from tests.support.forge import Forge
from tests.support.harness import PATIENT, Workshop

pytestmark = pytest.mark.runs

SITES, ROUNDS, STEPS, BATCH, LENGTH = 2, 4, 8, 4, 32

SCRIPT = """\
import json, multiprocessing, sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import dilocox

here = Path(sys.argv[1])
sys.path.insert(0, str(here))
import score


def note(kind, *what):
    name = multiprocessing.current_process().name
    with (here / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps([kind, *what]) + "\\n")


def dataset(start, count):
    note("read", start, count)
    # Counting up from a start of its own: easy to learn, and nothing like the corpus.
    numbers = np.arange(start, start + count)[:, None]
    return 40 + (numbers * 7 + np.arange(33)) % 50


def loss(logits, labels):
    note("loss", list(logits.shape), list(labels.shape), int(labels.min()), int(labels.max()))
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)


def on_evaluation(round_, value):
    note("evaluation", round_, value)


run = dilocox.load_run(sys.argv[2], sys.argv[3:])
result = dilocox.train(run, dataset=dataset, loss=loss, on_evaluation=on_evaluation,
                       evaluation=score.score)
exported = dilocox.export(result.folder, here / "exported", "bf16")
text = dilocox.generate(exported, "def", tokens=5)
again = dilocox.generate(result.folder, "def", tokens=5, temperature=0)

from transformers import AutoModelForCausalLM

whole = {}
for folder in [exported, *sorted(result.folder.glob("model-[bt]*"))]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    whole[folder.name] = {
        "dtype": str(model.dtype),
        "wrong": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]])),
    }
(here / "said.json").write_text(json.dumps({
    "finished": result.finished, "summary": result.summary, "folder": str(result.folder),
    "texts": [text, again], "loaded": whole, "names": [n for n, _ in model.named_parameters()],
}))
"""

SCORE = """\
import torch


def score(model, tokenizer):
    numbers = torch.arange(4)[:, None]
    ids = 40 + (numbers * 7 + torch.arange(33)) % 50
    return {"loss": model(ids, labels=ids).loss, "tokens": len(tokenizer)}
"""


@dataclass
class Script:
    """What the script left."""

    here: Path
    said: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.said["folder"])

    def noted(self, kind: str, process: str) -> list[list[Any]]:
        path = self.here / f"{process}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row[1:] for row in map(json.loads, lines) if row[0] == kind]

    def metrics(self, kind: str, whole_run: bool = False) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["kind"] == kind]
        return [row for row in rows if ("site" not in row) == whole_run]


@pytest.fixture(scope="module")
def script(
    shared_workshop: Workshop, forge: Forge, tmp_path_factory: pytest.TempPathFactory
) -> Script:
    here = tmp_path_factory.mktemp("script")
    (here / "script.py").write_text(SCRIPT)
    (here / "score.py").write_text(SCORE)
    sets = [
        f"outer.rounds={ROUNDS}",
        "checkpoint.every_rounds=1",
        "checkpoint.hugging_face=true",
        "checkpoint.best=true",
        'metrics.sinks=["tensorboard"]',
        "evaluation.every_rounds=2",
        "evaluation.tasks_every=3",
        PATIENT,
    ]
    run_file, *rest = shared_workshop.run_file("api", *sets)
    overrides = [item for item in rest if item != "--set"]
    words = ("python", str(here / "script.py"), str(here), run_file, *overrides)
    done = forge.command(shared_workshop, "api", *words)
    assert done.wait() == 0, done.output()
    return Script(here, json.loads((here / "said.json").read_text()))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def fragments_of(folder: Path, order: list[str]) -> list[list[dict[str, torch.Tensor]]]:
    """Tensors of a Hugging Face folder by stage and fragment; names in the model's `order`."""
    stages = []
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        groups = split_pieces({n: tensors[n].numel() for n in order if n in tensors}, 2)
        stages.append([{name: tensors[name] for name in names} for names in groups])
    return stages


@pytest.mark.slow
def test_the_dataset_is_what_was_trained_on(script: Script) -> None:
    read = {}
    for site in ("paris", "lyon"):
        first, last = (script.noted("read", f"{site}-stage{stage}-shard0") for stage in (0, 1))
        assert first == last
        numbers = [n for start, count in first for n in range(start, start + count)]
        assert len(numbers) == ROUNDS * STEPS * BATCH
        read[site] = set(numbers)
        assert len(read[site]) == len(numbers)
    assert not read["paris"] & read["lyon"]
    assert read["paris"] | read["lyon"] == set(range(SITES * ROUNDS * STEPS * BATCH))
    assert script.said["summary"]["tokens"] == SITES * ROUNDS * STEPS * BATCH * LENGTH
    # Counting is learnt at once, the corpus is not.
    assert script.metrics("round", whole_run=True)[-1]["loss"] < 4.6


def test_the_loss_is_used_by_the_last_stage_alone(script: Script) -> None:
    for site in ("paris", "lyon"):
        assert not script.noted("loss", f"{site}-stage0-shard0")
        calls = script.noted("loss", f"{site}-stage1-shard0")
        trained = [call for call in calls if call[2] >= 40 and call[3] < 90]
        assert len(trained) == ROUNDS * STEPS * 2
        assert {json.dumps(call[:2]) for call in trained} == {"[[2, 32, 300], [2, 32]]"}


def test_evaluations_are_told_and_recorded(script: Script) -> None:
    told = script.noted("evaluation", "paris-stage0-shard0")
    assert [round_ for round_, _ in told] == [-1, 1, 4]
    summary = script.said["summary"]
    assert told[0][1] == summary["val_loss_first"]
    assert told[-1][1] == summary["val_loss_last"] != told[0][1]
    recorded = [(row["after_round"], row["val_loss"]) for row in script.metrics("evaluation")]
    assert sorted(recorded) == [tuple(row) for row in told]


def test_a_function_of_ones_own_scores_the_shared_model(script: Script) -> None:
    found = script.metrics("tasks")
    # Rounds that end while an evaluation runs are passed over; the finished model never is.
    assert [row["after_round"] for row in found] == sorted({row["after_round"] for row in found})
    assert (len(found) > 1, found[-1]["after_round"]) == (True, ROUNDS)
    assert {row["site"] for row in found} == {"paris"}
    first, last = found[0]["results"], found[-1]["results"]
    assert last["score/loss"] < first["score/loss"]
    assert last["score/tokens"] == 300
    assert script.said["summary"]["tasks_last"]["results"] == last
    space: dict[str, Any] = {}
    exec(SCORE, space)
    tokenizer, model = load_model(script.folder / "model", "cpu")
    assert last["score/loss"] == pytest.approx(space["score"](model, tokenizer)["loss"].item())


def test_the_exported_model_is_the_anchor(script: Script) -> None:
    anchor, exported = tensors_in(script.folder / "model"), tensors_in(script.here / "exported")
    assert anchor.keys() == exported.keys()
    for name, tensor in anchor.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(exported[name], tensor.to(torch.bfloat16)), name
    loaded = script.said["loaded"]
    assert loaded["exported"] == {"dtype": "torch.bfloat16", "wrong": []}
    assert all(not model["wrong"] for model in loaded.values())
    assert all(text.startswith("def") for text in script.said["texts"])


def test_the_model_of_the_lowest_held_out_loss_is_kept(script: Script) -> None:
    told = script.noted("evaluation", "paris-stage0-shard0")[1:]
    round_, loss = min(told, key=lambda each: each[1])
    kept = script.folder / "model-best"
    said = json.loads((kept / "held_out.json").read_text())
    assert said == {"after_round": round_, "val_loss": loss, "site": "paris"}
    same = script.folder / ("model" if round_ == ROUNDS else f"model-tick-{8 * (round_ + 1):08d}")
    best, expected = tensors_in(kept), tensors_in(same)
    assert best.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in best.items())
    assert "model-best" in script.said["loaded"]
    assert not list(script.folder.glob("model-best.*"))


def test_checkpoints_are_kept_and_handed_out(script: Script) -> None:
    ticks = sorted((script.folder / "checkpoints").iterdir())
    # An older one stays only where another rank had not written the one after it yet.
    assert [folder.name for folder in ticks][-2:] == ["tick-00000024", "tick-00000032"]
    assert len(ticks) <= 3
    published = sorted(folder.name for folder in script.folder.glob("model-tick-*"))
    assert published == ["model-tick-00000008", "model-tick-00000016", "model-tick-00000024"]
    assert set(published) < set(script.said["loaded"])
    # The folder of a tick holds the anchor of its checkpoint, fragment by fragment.
    stages = fragments_of(script.folder / published[-1], script.said["names"])
    for stage, fragments in enumerate(stages):
        own = ticks[-2] / f"lyon/stage{stage}-shard0/write-1"
        digest = hashlib.sha256((own / "files.json").read_bytes()).hexdigest()
        root = str(script.folder / "checkpoints")
        state = load(root, 24, "lyon", stage, 0, digest).tensors
        for number, tensors in enumerate(fragments):
            layout = Layout.of({name: tensor.shape for name, tensor in tensors.items()})
            assert torch.equal(layout.pack(tensors), state[f"outer/{number}/anchor"])


def test_tensorboard_holds_the_metrics(script: Script) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(script.folder / "tensorboard" / "run"))
    events.Reload()
    for key in ("loss", "payload_bytes", "tokens_per_second"):
        told = {event.step: event.tensor_proto.float_val[0] for event in events.Tensors(key)}
        rows = {row["step"]: row[key] for row in script.metrics("round", whole_run=True)}
        assert told == pytest.approx(rows)
    site = accumulator.EventAccumulator(str(script.folder / "tensorboard" / "paris"))
    site.Reload()
    assert len(site.Tensors("val_loss")) >= 3


def test_the_summary_adds_up(script: Script) -> None:
    written = json.loads((script.folder / "summary.json").read_text())
    assert written == script.said["summary"]
    needed = {
        "val_loss_first", "val_loss_last", "tokens", "tokens_per_second", "payload_bytes",
        "allreduce_bytes", "sites", "stages", "rounds", "anchor_digest",
    }  # fmt: skip
    assert needed <= written.keys()
    assert (written["sites"], written["stages"], written["rounds"]) == (SITES, 2, ROUNDS)
    rounds, flush = script.metrics("round", whole_run=True), script.metrics("flush")
    sites = script.metrics("round")
    for key in ("tokens", "payload_bytes", "allreduce_bytes"):
        assert written[key] == sum(row[key] for row in [*sites, *flush]), key
        assert sum(row[key] for row in rounds) == sum(row[key] for row in sites), key
    assert written["tokens_per_second"] == pytest.approx(
        written["tokens"] / sum(row["seconds"] for row in rounds)
    )
    assert {row["anchor_digest"] for row in flush} == {written["anchor_digest"]}
    assert written["admission"] == {}, "two honest sites are accused of nothing"


def test_the_payload_is_what_the_formula_says(script: Script) -> None:
    stages = fragments_of(script.folder / "model", script.said["names"])
    assert [len(fragments) for fragments in stages] == [2, 2]
    shapes = [
        {name: tensor.shape for name, tensor in tensors.items()}
        for fragments in stages
        for tensors in fragments
    ]
    lengths = [Layout.of(each).length for each in shapes]
    # In rounds one in 32 rows of every matrix has a byte behind the values.
    rows = sum(-(-s[0] // 32) for each in shapes for s in each.values() if len(s) > 1)
    # A header of 64 bytes; a scale of two bytes and the codes per block of 128.
    once = {bits: sum(64 + n // 128 * (2 + 16 * bits) for n in lengths) for bits in (4, 8)}
    written = script.said["summary"]
    assert written["payload_bytes"] == SITES * (ROUNDS * (once[4] + rows) + once[8])
    parameters = sum(t.numel() for t in tensors_in(script.folder / "model").values())
    # A ring all-reduce of fp32 gradients at every step: 2(D-1)/D times 4 bytes at each site.
    assert written["allreduce_bytes"] == SITES * ROUNDS * STEPS * 4 * parameters


def test_data_of_the_run_is_prepared_all_the_same(script: Script) -> None:
    """Tokenizer and held-out text come from the corpus, also with an own dataset."""
    config = (script.folder / "run.toml").read_text()
    folder = next(line for line in config.splitlines() if "/data" in line).split('"')[1]
    assert TokenFiles.open(Path(folder)).vocabulary_size == 300
