"""Several sources with weights, from files of text to numbered sequences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.data import DataSection
from dilocox.data import SequenceSpace, TokenFiles, held_out, prepare, show
from dilocox.data.coverage import seen_documents
from dilocox.data.croissant import render_croissant
from dilocox.data.parts import parts_of
from dilocox.data.rows import RowBatch, describe_rows
from dilocox.errors import DataError
from tests.data.chat_templates import CHATML
from tests.data.chats import talks, write_records
from tests.data.conftest import story

LENGTH = 16
COUNTS = {"prose": 30, "notes": 12, "poetry": 20}


def write(folder: Path, name: str, count: int) -> Path:
    """A folder of texts of its own for every name."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        text = story(number + 1000 * sum(name.encode()))
        (place / f"{number:03d}.txt").write_text(f"{name} {text}", encoding="utf-8")
    return place


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("texts")
    return {name: write(folder, name, count) for name, count in COUNTS.items()}


def section(places: dict[str, Path], tables: dict[str, dict[str, Any]], **keys: Any) -> DataSection:
    sources = [{"name": name, "source": str(places[name])} | own for name, own in tables.items()]
    usual = {"vocabulary_size": 300, "sequence_length": LENGTH, "validation_fraction": 0.1}
    return DataSection.model_validate(usual | {"sources": sources} | keys)


TABLES: dict[str, dict[str, Any]] = {
    "prose": {"weight": 3},
    "notes": {"weight": 1, "epochs": 1.5},
    "poetry": {"weight": 0.5},
}


@pytest.fixture(scope="session")
def mixed(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> TokenFiles:
    return prepare(section(places, TABLES), tmp_path_factory.mktemp("mixed") / "data", seed=0)


@pytest.fixture(scope="session")
def space(mixed: TokenFiles) -> SequenceSpace:
    return SequenceSpace(mixed, seed=0, sequence_length=LENGTH)


def own_sequences(mixed: TokenFiles, number: int) -> set[tuple[int, ...]]:
    """All sequences of one source, cut from its own tokens."""
    parts = mixed.content["splits"]["train"]["parts"]
    first = sum(part["tokens"] for part in parts[:number])
    count = (parts[number]["tokens"] - 1) // LENGTH
    offsets = first + np.arange(count) * LENGTH
    return {tuple(row) for row in mixed.tokens("train").gather(offsets, LENGTH + 1).tolist()}


def test_each_source_is_one_part_of_each_split(mixed: TokenFiles) -> None:
    assert [part["name"] for part in mixed.content["splits"]["train"]["parts"]] == list(TABLES)
    for split in ("train", "validation"):
        parts = parts_of(mixed, split)
        assert sum(part.token_count(split) for part in parts) == mixed.token_count(split)
        assert sum(part.document_count(split) for part in parts) == mixed.document_count(split)
        ends = np.concatenate(
            [
                part.document_ends(split) + sum(each.token_count(split) for each in parts[:number])
                for number, part in enumerate(parts)
            ]
        )
        assert ends.tolist() == mixed.document_ends(split).tolist()


def test_a_source_gives_its_share_and_only_its_own_sequences(
    mixed: TokenFiles, space: SequenceSpace
) -> None:
    rows = [tuple(row) for row in space.read(0, 90).tolist()]
    owners = [
        next(number for number in range(3) if row in own_sequences(mixed, number)) for row in rows
    ]
    assert np.bincount(owners).tolist() == [60, 20, 10]
    assert space.mixed is not None
    assert owners == space.mixed.mixture.sources(0, 90).tolist()


def test_each_epoch_of_a_source_holds_each_of_its_sequences_once(
    mixed: TokenFiles, space: SequenceSpace
) -> None:
    """And a source with epochs gives one and a half, then no more."""
    assert space.mixed is not None
    sizes = [each.sequences_per_epoch for each in space.parts]
    positions = space.positions(0, 40 * sum(sizes))
    bases = np.cumsum([0, *sizes])
    for number, size in enumerate(sizes):
        own = positions[(positions >= bases[number]) & (positions < bases[number + 1])]
        if TABLES[list(TABLES)[number]].get("epochs"):
            assert len(own) == 3 * size // 2
        else:
            assert sorted(own[size : 2 * size]) == sorted(own[:size])
            assert own[size : 2 * size].tolist() != own[:size].tolist()
        assert sorted(own[:size]) == list(range(bases[number], bases[number + 1]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2000), st.integers(0, 90))
def test_any_range_reads_the_same_as_number_by_number(
    mixed: TokenFiles, space: SequenceSpace, start: int, count: int
) -> None:
    whole = space.read(start, count)
    assert whole.shape == (count, LENGTH + 1)
    for row in range(0, count, 7):
        assert space.read(start + row, 1)[0].tolist() == whole[row].tolist()


def test_weights_and_epochs_change_digest_and_order_but_no_token(
    mixed: TokenFiles, places: dict[str, Path], tmp_path: Path
) -> None:
    changed: list[tuple[str, dict[str, Any]]] = [
        ("prose", {"weight": 4}),
        ("poetry", {"epochs": 2}),
    ]
    for name, change in changed:
        tables = TABLES | {name: TABLES[name] | change}
        other = prepare(section(places, tables), tmp_path / name, seed=0)
        assert other.digest != mixed.digest
        assert other.content["splits"] == mixed.content["splits"]


def test_ratios_are_what_counts(places: dict[str, Path], tmp_path: Path) -> None:
    weights = [(3, 1), (0.75, 0.25), (1.5, 0.5)]
    tables = [{"prose": {"weight": a}, "poetry": {"weight": b}} for a, b in weights]
    found = [
        prepare(section(places, each), tmp_path / str(number), seed=0)
        for number, each in enumerate(tables)
    ]
    spaces = [SequenceSpace(each, seed=0, sequence_length=LENGTH).mixed for each in found]
    orders = [each.mixture.sources(0, 99).tolist() for each in spaces if each is not None]
    assert orders == [orders[0]] * 3


def test_without_weights_a_source_has_the_share_of_its_size(
    places: dict[str, Path], tmp_path: Path
) -> None:
    files = prepare(section(places, {"prose": {}, "notes": {}}), tmp_path / "data", seed=0)
    space = SequenceSpace(files, seed=0, sequence_length=LENGTH)
    once = space.positions(0, space.sequences_per_epoch)
    assert sorted(once) == list(range(space.sequences_per_epoch))


def test_the_documents_that_ranges_hold_are_found(mixed: TokenFiles, space: SequenceSpace) -> None:
    """Compared with counting token by token."""
    ranges = [(0, 40), (30, 25), (700, 3)]
    read = np.zeros(mixed.token_count("train"), dtype=bool)
    firsts = np.cumsum([0, *(part.token_count("train") for part in parts_of(mixed, "train"))])
    bases = np.cumsum([0, *(each.sequences_per_epoch for each in space.parts)])
    for start, count in ranges:
        for position in space.positions(start, count):
            source = int(np.searchsorted(bases, position, side="right")) - 1
            first = firsts[source] + (position - bases[source]) * LENGTH
            read[first : first + LENGTH] = True
    ends = mixed.document_ends("train")
    starts = np.concatenate([[0], ends[:-1]])
    expected = {n: int(read[a:b].sum()) for n, (a, b) in enumerate(zip(starts, ends, strict=True))}
    found = seen_documents(mixed, space, ranges)
    assert {each.document: each.seen for each in found} == {n: s for n, s in expected.items() if s}
    documents = [part.document_count("train") for part in parts_of(mixed, "train")]
    for each in found:
        assert each.source == int(np.searchsorted(np.cumsum(documents), each.document, "right"))


def test_held_out_sequences_are_shared_by_weight(mixed: TokenFiles) -> None:
    own = {
        part.name: {tuple(row) for row in held_out(part, LENGTH, 10**6).tolist()}
        for part in parts_of(mixed, "validation")
    }
    rows = [tuple(row) for row in held_out(mixed, LENGTH, 9).tolist()]
    counts = {name: sum(row in some for row in rows) for name, some in own.items()}
    assert counts == {"prose": 6, "notes": 2, "poetry": 1}


def test_held_out_text_of_its_own_for_one_source_and_for_all(
    places: dict[str, Path], tmp_path: Path
) -> None:
    tables: dict[str, dict[str, Any]] = {
        "prose": {"validation_source": str(places["poetry"])},
        "notes": {"validation_fraction": 0},
    }
    files = prepare(section(places, tables), tmp_path / "one", seed=0)
    parts = files.content["splits"]["validation"]["parts"]
    assert [(part["name"], part["documents"]) for part in parts] == [("prose", COUNTS["poetry"])]
    assert files.document_count("train") == COUNTS["prose"] + COUNTS["notes"]
    data = section(places, {"prose": {}, "notes": {}}, validation_source=[str(places["poetry"])])
    files = prepare(data, tmp_path / "all", seed=0)
    parts = files.content["splits"]["validation"]["parts"]
    assert [(part["name"], part["documents"]) for part in parts] == [
        ("validation source", COUNTS["poetry"])
    ]
    assert "held out" in show(files)


def test_one_source_without_tables_keeps_its_format_and_names_no_mixture(
    files: TokenFiles,
) -> None:
    assert files.manifest["format"] == 1
    assert "mixture" not in files.content
    assert "parts" not in files.content["splits"]["train"]
    assert "sources" not in files.manifest["made_with"]["options"]


def test_what_is_shown_and_described(mixed: TokenFiles) -> None:
    assert mixed.manifest["format"] == 3
    shown = show(mixed)
    assert "prose: weight 3, " in shown
    assert "notes: weight 1, 1.5 epochs at most, " in shown
    described = json.loads(render_croissant(mixed.content))["description"]
    assert "notes: source 1, weight 1.0, 1.5 epochs at most." in described
    mixed.verify()


def test_prepared_files_are_taken_again_but_not_with_other_weights(
    mixed: TokenFiles, places: dict[str, Path]
) -> None:
    again = prepare(section(places, TABLES), mixed.folder, seed=0)
    assert again.digest == mixed.digest
    other = section(places, TABLES | {"prose": {"weight": 4}})
    with pytest.raises(DataError, match=r"made with other options \(sources "):
        prepare(other, mixed.folder, seed=0)


def test_tokenizers_sample_holds_all_sources(mixed: TokenFiles) -> None:
    sample = mixed.content["tokenizer"]["sample"]
    assert sample["documents"] == mixed.document_count("train")


def empty_folder(places: dict[str, Path], folder: Path) -> dict[str, Path]:
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("\n")
    return places | {"notes": folder / "notes"}


def short_text(places: dict[str, Path], folder: Path) -> dict[str, Path]:
    for number in range(2):
        write(folder, "notes", 2)
        (folder / "notes" / f"00{number}.txt").write_text(f"short {number}")
    return places | {"notes": folder / "notes"}


@pytest.mark.parametrize(
    ("spoil", "change", "packing", "message"),
    [
        (empty_folder, {}, "stream", 'data.sources "notes": no text in the sources; name files'),
        *(
            (
                empty_folder,
                {"validation_fraction": 0},
                packing,
                'data.sources "notes": the train split has 0 tokens, sequence_length 16 needs 17; ',
            )
            for packing in ("stream", "documents", "none")
        ),
        (
            short_text,
            {},
            "stream",
            r'data.sources "notes": the \w+ split has \d+ tokens, sequence_length 16',
        ),
        (
            None,
            {"epochs": 1e-6},
            "stream",
            'data.sources "notes": 1e-06 epochs of its [0-9,]+ sequences are',
        ),
    ],
)
def test_a_source_without_enough_text_is_named(
    places: dict[str, Path],
    tmp_path: Path,
    spoil: Callable[[dict[str, Path], Path], dict[str, Path]] | None,
    change: dict[str, Any],
    packing: str,
    message: str,
) -> None:
    spoilt = places if spoil is None else spoil(places, tmp_path)
    data = section(spoilt, {"prose": {}, "notes": change}, packing=packing)
    with pytest.raises(DataError, match=message) as caught:
        prepare(data, tmp_path / "data", seed=0)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_source_of_conversations_that_teach_nothing_is_named(
    tmp_path: Path, packing: str
) -> None:
    silent = [
        {"messages": [message | {"weight": 0} for message in each["messages"]]}
        for each in talks(12)
    ]
    (tmp_path / "template.jinja").write_text(CHATML, encoding="utf-8")
    made = {"good": write_records(tmp_path / "good.jsonl", talks()),
            "silent": write_records(tmp_path / "silent.jsonl", silent)}  # fmt: skip
    data = section(
        made,
        {"good": {}, "silent": {}},
        format="chat",
        chat_template=str(tmp_path / "template.jinja"),
        packing=packing,
        sequence_length=128,
    )
    message = r'data.sources "silent": the train split has 0 tokens, and no token of its .*weight 0'
    with pytest.raises(DataError, match=message):
        prepare(data, tmp_path / "data", seed=0)


def test_rows_of_whole_documents_are_planned_by_source(
    mixed: TokenFiles, places: dict[str, Path]
) -> None:
    data = section(places, TABLES, packing="documents", sequence_length=64)
    space = SequenceSpace.of(data, mixed, seed=0)
    assert space.mixed is not None
    batch, owners = space.read(5, 40), space.mixed.mixture.sources(5, 40)
    assert isinstance(batch, RowBatch)
    assert batch.counted == space.counted(5, 40)
    assert batch.positions is not None
    for number, owner in enumerate(owners.tolist()):
        own = space.parts[owner].rows
        assert own is not None
        all_rows = own.read(np.arange(len(own.counted)))
        assert batch.inputs[number].tolist() in all_rows.inputs.tolist()
    found = held_out(mixed, data.rows, 9)
    assert isinstance(found, RowBatch)
    assert len(found.inputs) == 9
    seen = seen_documents(mixed, space, [(0, 4 * space.sequences_per_epoch)])
    assert [each.document for each in seen] == list(range(mixed.document_count("train")))
    described = describe_rows(mixed, data.rows)
    assert described is not None
    assert described["train"]["rows"] == sum(len(p.rows.counted) for p in space.parts if p.rows)
