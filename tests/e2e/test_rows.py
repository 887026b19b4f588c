"""A run on packed documents of which some tokens count: stopped, resumed, verified, repeated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dilocox.config.data import DataSection
from dilocox.data import TokenFiles, prepare
from tests.data.flagged import Document, write_flagged
from tests.support.harness import Workshop, verdicts

pytestmark = [pytest.mark.stops, pytest.mark.slow]


def conversations(files: TokenFiles, split: str, seed: int) -> list[Document]:
    """Documents of 4 to 60 tokens, of which the second half counts; a few have none that does."""
    tokens = files.tokens(split).gather(np.zeros(1, dtype=np.int64), files.token_count(split))[0]
    draw, found = np.random.default_rng(seed), []
    while len(tokens) > 60:
        length = int(draw.integers(4, 60))
        counted = (np.arange(length) >= length // 2) & (draw.random() > 0.1)
        found.append((tokens[:length].tolist(), counted.astype(int).tolist()))
        tokens = tokens[length:]
    return found


def write_files(workshop: Workshop) -> Path:
    """Token files with flags, which look as if the runs of the workshop had made them."""
    data = DataSection(
        source=str(workshop.text), vocabulary_size=300, sequence_length=32, validation_sequences=8
    )
    text = prepare(data, workshop.root / "rows-text", seed=0)
    folder = workshop.root / "rows-data"
    write_flagged(
        folder, text, conversations(text, "train", 0), conversations(text, "validation", 1)
    )
    return folder


def test_packed_documents_are_resumed_verified_and_repeated(workshop: Workshop) -> None:
    sets = (
        f"data.folder={write_files(workshop)}",
        "data.packing=documents",
        "data.long_documents=cut",
        "record.states_every=1",
        "checkpoint.every_rounds=0",
        "network.heartbeat=5",
        "outer.rounds=16",
        "outer.inner_steps=24",
    )
    whole = workshop.train("rows-whole", *sets)
    assert "rows: documents, 32 positions" in whole.printed()
    cut = workshop.start("rows-cut", *sets)
    cut.until_round(2)
    cut.interrupt()
    assert cut.wait() == 130, cut.output()
    again = workshop.start("rows-cut", *sets, flags=("--resume",))
    assert again.wait() == 0, again.output()
    for file in sorted((whole.folder / "model").glob("*.safetensors")):
        assert file.read_bytes() == (cut.folder / "model" / file.name).read_bytes()
    for site in ("paris", "lyon"):
        rounds = [
            [(each["round"], each["labels"], each["loss"]) for each in run.records(site=site)]
            for run in (whole, cut)
        ]
        assert rounds[0] == rounds[1]
        tokens = 24 * 4 * 32
        assert all(0 < labels < tokens for _, labels, _ in rounds[0])
    assert verdicts(cut.folder) == {"beacon": "NOT_RUN", "audits": "NOT_RUN"}
    found = workshop.ask("audit", str(cut.folder), "--round", "1")
    assert [each["verdict"] for each in found["verdicts"]] == ["EXACT"] * 2, found
    documents = workshop.ask("data", "show", str(cut.folder))["documents"]
    assert documents
    assert all(0 < each["seen"] <= each["tokens"] for each in documents)
    assert any(each["seen"] == each["tokens"] for each in documents)
