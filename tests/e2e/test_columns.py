"""A run whose loss weighs every record by a column of the data, over two stages and two sites."""

from __future__ import annotations

import json

import pytest

from dilocox.config.data import RowRules
from dilocox.data import SequenceSpace, TokenFiles, held_out
from dilocox.data.rows import RowBatch
from tests.data.chats import write_records
from tests.data.conftest import story
from tests.support.forge import Forge
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

SCRIPT = """\
import json, multiprocessing, sys
from pathlib import Path

import torch.nn.functional as F

import dilocox

here = Path(sys.argv[1])


def loss(logits, labels, columns):
    name = multiprocessing.current_process().name
    with (here / f"{name}.jsonl").open("a") as file:
        for row, weights in zip(labels.tolist(), columns["weight"].tolist()):
            file.write(json.dumps([row, weights]) + "\\n")
    each = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none"
    )
    return (each * columns["weight"].flatten()).sum(), (labels >= 0).sum()


run = dilocox.load_run(sys.argv[2], sys.argv[3:])
result = dilocox.train(run, loss=loss)
(here / "said.json").write_text(json.dumps(result.summary))
"""


def pairs(rows: object) -> set[str]:
    """Labels and weights of every row, as the script writes them."""
    assert isinstance(rows, RowBatch)
    assert rows.columns is not None
    both = zip(rows.labels.tolist(), rows.columns["weight"].tolist(), strict=True)
    return {json.dumps([*each]) for each in both}


def test_columns_reach_the_last_stage_with_their_labels(workshop: Workshop, forge: Forge) -> None:
    place = workshop.root / "columns-text"
    place.mkdir()
    (place / "script.py").write_text(SCRIPT)
    texts = [{"text": story(number, 25), "weight": number % 7 / 2} for number in range(80)]
    source = write_records(place / "texts.jsonl", texts)
    run_file, *rest = workshop.run_file(
        "columns", "outer.rounds=3", "data.format=jsonl", f"data.source={source}",
        'data.columns=["weight"]', f"data.folder={place / 'data'}", "data.packing=documents",
        "evaluation.every_rounds=1", "admission.gate=true", "admission.aggregation=clip", PATIENT,
    )  # fmt: skip
    overrides = [item for item in rest if item != "--set"]
    refused = forge.command(workshop, "columns", "train", run_file, *rest)
    assert refused.wait() == 1
    assert "data.columns weight: no loss reads them" in refused.printed()
    words = ("python", str(place / "script.py"), str(place), run_file, *overrides)
    done = forge.command(workshop, "columns", *words)
    assert done.wait() == 0, done.output()
    summary = json.loads((place / "said.json").read_text())
    assert summary["val_loss_last"] < summary["val_loss_first"]
    files = TokenFiles.open(place / "data")
    space = SequenceSpace(
        files, seed=0, sequence_length=32, packing="documents", long_documents="split"
    )
    rules = RowRules(32, "documents", "split")
    known = pairs(space.read(0, space.sequences_per_epoch)) | pairs(held_out(files, rules, 8))
    for site in ("paris", "lyon"):
        assert not (place / f"{site}-stage0-shard0.jsonl").exists()
        lines = (place / f"{site}-stage1-shard0.jsonl").read_text().splitlines()
        told = {line for line in lines if set(json.loads(line)[1]) != {1.0}}
        assert len(told) > 40
        assert told <= known
    assert not set(verdicts(workshop.folder("columns")).values()) - {"NOT_RUN"}
