"""Conversations from records to a model that answers and stops."""

from __future__ import annotations

import json

import pytest

import dilocox
from dilocox.data import TokenFiles
from dilocox.data.example import example
from tests.data.chat_templates import CHATML
from tests.data.chats import write_records
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs


def test_a_model_learns_to_answer_and_to_stop(workshop: Workshop) -> None:
    place = workshop.root / "chat-text"
    place.mkdir()
    (place / "template.jinja").write_text(CHATML, encoding="utf-8")
    records = [
        {
            "messages": [
                {"role": "user", "content": f"Is {n} more than {n - 1}? " + "Say it. " * (n % 3)},
                {"role": "assistant", "content": "It is so."},
            ]
        }
        for n in range(120)
    ]
    source = write_records(place / "chats.jsonl", records)
    run = workshop.train(
        "chat", "outer.rounds=12", "site.stages=1", PATIENT, "data.format=chat",
        f"data.source={source}", f"data.chat_template={place / 'template.jinja'}",
        f"data.folder={place / 'data'}", "data.vocabulary_size=290", "data.sequence_length=64",
        "data.validation_fraction=0.1", "checkpoint.best=true", "evaluation.every_rounds=4",
    )  # fmt: skip
    files = TokenFiles.open(place / "data")
    assert "[[It is so.<|im_end|>]]" in example(files, 0)
    assert (run.folder / "model" / "chat_template.jinja").read_text() == CHATML
    settings = json.loads((run.folder / "model" / "generation_config.json").read_text())
    ends = files.content["conversations"]["end_of_turn"]
    assert settings["eos_token_id"] == [end["id"] for end in ends]
    assert [end["token"] for end in ends] == ["<|endoftext|>", "<|im_end|>"]
    answer = dilocox.generate(run.folder, "Is 7 more than 6?", chat=True, temperature=0, tokens=20)
    assert answer == "It is so."
    best = json.loads((run.folder / "model-best" / "held_out.json").read_text())
    losses = {row["after_round"]: row["val_loss"] for row in run.records("evaluation", "paris")}
    assert len(losses) >= 4
    assert best["val_loss"] == losses[best["after_round"]] == min(losses.values())
    assert (run.folder / "model-best" / "chat_template.jinja").read_text() == CHATML
    assert not verdicts(run.folder)
