"""Pairs of answers: their records, their tokens, and rows that hold whole pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.data import DataSection, RowRules
from dilocox.config.run_config import resolve_run
from dilocox.data import TokenFiles, prepare
from dilocox.data.conversations import Conversation, Layout
from dilocox.data.example import example
from dilocox.data.flags import COUNTED, SECOND, STARTS
from dilocox.data.packing import Packer
from dilocox.data.rows import plan_rows
from dilocox.errors import DataError
from tests.data.chat_templates import CHATML
from tests.data.chats import write_records
from tests.data.conftest import section, story

LAYOUT = Layout("preference")


def turns(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


FORMS: list[dict[str, Any]] = [
    {"prompt": turns("Q"), "chosen": answer("good"), "rejected": answer("bad")},
    {"prompt": "Q", "chosen": answer("good"), "rejected": answer("bad")},
    {"chosen": turns("Q", "good"), "rejected": turns("Q", "bad")},
    {"prompt": None, "chosen": json.dumps(turns("Q", "good")), "rejected": turns("Q", "bad")},
    # Columns of Parquet often hold lists of messages as JSON text.
    {"chosen": json.dumps(turns("Q", "good")), "rejected": json.dumps(turns("Q", "bad"))},
    {
        "prompt": json.dumps(turns("Q")),
        "chosen": json.dumps(answer("good")),
        "rejected": json.dumps(answer("bad")),
    },
    {"prompt": "Q", "chosen": json.dumps(answer("good")), "rejected": json.dumps(answer("bad"))},
]


@pytest.mark.parametrize("record", FORMS)
def test_all_forms_are_the_same_pair(record: dict[str, Any]) -> None:
    pair = LAYOUT.parse(record, "here")
    assert isinstance(pair, Conversation)
    assert json.loads(pair) == {
        "chosen": {"messages": turns("Q", "good")},
        "rejected": {"messages": turns("Q", "bad")},
    }
    assert pair.texts() == "Q\ngood\nQ\nbad"


@pytest.mark.parametrize("record", [*FORMS, {"prompt": "Q", "chosen": "good", "rejected": "bad"}])
def test_a_system_beside_a_pair_comes_first_in_both(record: dict[str, Any]) -> None:
    pair = LAYOUT.parse(record | {"system": "S"}, "here")
    assert pair is not None
    system = {"role": "system", "content": "S"}
    assert json.loads(pair) == {
        "chosen": {"messages": [system, *turns("Q", "good")]},
        "rejected": {"messages": [system, *turns("Q", "bad")]},
    }
    assert "system" in LAYOUT.optional


@pytest.mark.parametrize("text", ['[{"name": "f"}]', '[{"role": "x"}]', "[{", '[{"a": 1, "a": 2}]'])
def test_answers_in_json_stay_text(text: str) -> None:
    pair = LAYOUT.parse({"prompt": "Q", "chosen": text, "rejected": "b"}, "here")
    assert pair is not None
    assert json.loads(pair)["chosen"] == {"prompt": "Q", "completion": text}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "Q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal; remove"),
        ({"chosen": "a", "rejected": "b"}, 'field "prompt" is not text, and chosen'),
        ({"prompt": "Q", "chosen": "a", "rejected": answer("b")}, 'field "chosen" is not a list'),
        (
            {"chosen": turns("Q", "a"), "rejected": turns("R", "b")},
            "chosen and rejected differ before their last message",
        ),
        ({"chosen": turns("Q"), "rejected": turns("R")}, "must end with a message of assistant"),
        ({"chosen": [{"role": "x"}], "rejected": turns("Q", "b")}, 'message 1: role "x"; a role'),
        ({"prompt": 3, "chosen": turns("Q", "a"), "rejected": turns("Q", "b")}, "not a list but"),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"^here: .*{reason}|^here: {reason}"):
        LAYOUT.parse(record, "here")


def test_records_without_an_answer_are_left_out_or_named(tmp_path: Path) -> None:
    for record in ({"chosen": "a"}, {"prompt": "Q", "chosen": " ", "rejected": "b"}):
        assert LAYOUT.parse(record, "here") is None
    source = write_records(tmp_path / "pairs.jsonl", [{"prompt": "Q", "completion": "a"}] * 3)
    with pytest.raises(DataError, match=r'no field "chosen" .*each record needs the better answer'):
        prepare(section(source, format="preference"), tmp_path / "data", seed=0)


def zeros(folder: Path, content: dict[str, Any]) -> None:
    """A reference that says 0 of every token."""
    for split in content["splits"].values():
        for shard in split["shards"]:
            name = Path(shard["file"]).stem + ".reference.col"
            (folder / name).write_bytes(bytes(4 * shard["tokens"]))
            shard["columns"] = {"reference": {"file": name, "sha256": "0" * 64}}


def pairs(count: int = 24) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Which number is {number}? ",
            "chosen": story(number, number % 5 + 3),
            "rejected": story(number + 100, number % 3 + 2),
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("template", [True, False])
def test_answers_stand_behind_each_other_and_are_learned(tmp_path: Path, template: bool) -> None:
    source = write_records(tmp_path / "pairs.jsonl", pairs())
    more: dict[str, Any] = {"format": "preference", "sequence_length": 200}
    if template:
        (tmp_path / "template.jinja").write_text(CHATML, encoding="utf-8")
        more["chat_template"] = str(tmp_path / "template.jinja")
    data = section(source, **more)
    files = prepare(data, tmp_path / "data", seed=0, finish=zeros)
    assert files.has_pairs
    assert (files.manifest["format"], files.column_names) == (4, ["reference"])
    end = "<|im_end|>" if template else "<|endoftext|>"
    shown = example(files, 0)
    assert shown.count("[[Story") == 2
    assert shown.count(f"{end}]]") == 2
    flags = files.flags("train")
    assert flags is not None
    count = files.document_count("train")
    firsts, seconds = flags.places_with(STARTS), flags.places_with(SECOND)
    assert len(firsts) == len(seconds) == count
    assert (firsts < seconds).all()
    first = flags.gather(seconds, 1)[:, 0]
    assert (first & COUNTED == 0).all()
    assert prepare(data, tmp_path / "data", seed=0).digest == files.digest


SIZES = st.lists(st.tuples(st.integers(2, 6), st.integers(2, 6)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, length=st.integers(4, 24))
def test_rows_hold_whole_pairs_whose_answers_do_not_see_each_other(
    tmp_path_factory: pytest.TempPathFactory,
    files: TokenFiles,
    sizes: list[tuple[int, int]],
    length: int,
) -> None:
    """Token n of the chosen answer of pair p is 20 p + n, of the rejected one 20 p + 10 + n."""
    folder = tmp_path_factory.mktemp("pairs")
    entries = {}
    for split in ("train", "validation"):
        packer = Packer(folder, split, 300, None, 1 << 20, flagged=True, columns=["reference"])
        ids = [
            [*range(20 * p, 20 * p + a), *range(20 * p + 10, 20 * p + 10 + b)]
            for p, (a, b) in enumerate(sizes)
        ]
        counted = [[0] + [1] * (a - 1) + [SECOND] + [1] * (b - 1) for a, b in sizes]
        packer.add(ids, 0, [(0, 0)] * len(ids), counted, [[0.5]] * len(ids))
        packer.close()
        entries[split] = packer.describe()
    content = files.content | {"splits": entries, "conversations": {"format": "preference"}}
    own = TokenFiles(folder, {"content": content, "digest": str(folder)})
    rules = RowRules(length, "documents", "leave_out")
    fitting = [p for p, (a, b) in enumerate(sizes) if a + b - 1 <= length]
    if not fitting:
        with pytest.raises(DataError, match="no row of the train split has a label"):
            plan_rows(own, "train", rules)
        return
    rows = plan_rows(own, "train", rules)
    assert rows is not None
    batch = rows.read(np.arange(len(rows.counted)))
    assert batch.columns is not None
    assert batch.positions is not None
    pair, seen = batch.columns["pair"], []
    assert rows.counted.tolist() == pair.max(axis=1).tolist()
    assert batch.counted == len(fitting)
    assert rows.filling.left_out == len(sizes) - len(fitting)
    for row, labels in enumerate(batch.labels):
        for number in range(1, int(pair[row].max()) + 1):
            learned = [labels[(pair[row] == side) & (labels >= 0)] for side in (number, -number)]
            p = int(learned[0][0]) // 20
            seen.append(p)
            a, b = sizes[p]
            assert learned[0].tolist() == list(range(20 * p + 1, 20 * p + a))
            assert learned[1].tolist() == list(range(20 * p + 11, 20 * p + 10 + b))
        learned_at = labels >= 0
        # Each label comes after its own predecessor, which has the position of its place.
        assert (batch.inputs[row][learned_at] == labels[learned_at] - 1).all()
        assert (batch.positions[row][learned_at] == batch.inputs[row][learned_at] % 10).all()
        assert (batch.columns["reference"][row][learned_at] == 0.5).all()
    assert sorted(seen) == fitting


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"packing": "stream"}, 'packing "stream" cannot be used with format "preference"'),
        ({"packing": "none"}, 'packing "none" cannot be used with format "preference"'),
        ({"loss_on": "all"}, 'loss_on "all" cannot be used with format "preference"'),
        ({"long_documents": "cut"}, 'long_documents "cut" would cut a pair of answers'),
        ({"columns": ["a"]}, 'columns cannot be used with format "preference"'),
    ],
)
def test_keys_that_do_not_fit_pairs_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DataSection.model_validate({"source": "x", "format": "preference"} | keys)


def test_the_run_needs_pairs_and_a_trained_model() -> None:
    run: dict[str, Any] = {
        "model": {"architecture": {"model_type": "qwen3"}},
        "sites": {"paris": {}, "lyon": {}},
    }
    with pytest.raises(Exception, match="compares with the model that the run starts from"):
        resolve_run(run | {"data": {"format": "preference", "source": "x"}})
    with pytest.raises(Exception, match=r"\[preference\] needs pairs of answers"):
        resolve_run(run | {"preference": {"beta": 0.2}})
    four_bits = {"model": {"path": "x"}, "adapter": {"base": "nf4"}}
    with pytest.raises(Exception, match=r'adapter\.base is "nf4": set adapter\.base = "full"'):
        resolve_run(run | four_bits | {"data": {"format": "preference", "source": "x"}})
    plain = resolve_run(run)
    assert plain.digest() == resolve_run(run | {"preference": {"beta": 0.1}}).digest()
    assert "preference" not in plain.shared(without_defaults=True)


def test_pairs_of_which_no_record_has_an_answer_are_named(tmp_path: Path) -> None:
    """A count of records and their fields, not a source without text."""
    records = [{"prompt": "Q", "chosen": "a", "rejected": None}] * 3
    source = write_records(tmp_path / "pairs.jsonl", records)
    said = r'none of 3 records has .*: "chosen" or "rejected" is null or empty; each record'
    with pytest.raises(DataError, match=said):
        prepare(section(source, format="preference"), tmp_path / "data", seed=0)


def test_pairs_that_are_all_longer_than_a_row_are_named(tmp_path: Path) -> None:
    """The message counts them, and names the folder that was asked for."""
    source = write_records(tmp_path / "pairs.jsonl", pairs())
    data = section(source, format="preference", sequence_length=4)
    with pytest.raises(DataError) as caught:
        prepare(data, tmp_path / "data", seed=0, finish=zeros)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'data'}: ")
    assert "documents are longer than data.sequence_length 4 and are left out" in said
    assert "raise data.sequence_length" in said
