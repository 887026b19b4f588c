from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from dilocox.data import TokenFiles, prepare, show
from dilocox.data.croissant import croissant
from dilocox.data.manifest import MANIFEST, render
from dilocox.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from dilocox.errors import DataError
from tests.data.chats import write_records
from tests.data.conftest import section, story

DOCUMENTS = [story(number) for number in range(30)]


def test_any_text_survives_and_never_becomes_a_special_token(tmp_path: Path) -> None:
    encoder = train_tokenizer(iter([DOCUMENTS]), 300, tmp_path / "t")
    assert (encoder.vocabulary_size, encoder.end_of_text) == (300, 0)

    @settings(derandomize=True, deadline=None, max_examples=100)
    @given(st.lists(st.one_of(st.text(max_size=30), st.just(f"a{END_OF_TEXT} b")), max_size=4))
    def check(documents: list[str]) -> None:
        for text, ids in zip(documents, encoder.encode(documents), strict=True):
            assert encoder.end_of_text not in ids
            assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == text

    check()


def test_training_does_not_depend_on_batches_or_threads(tmp_path: Path) -> None:
    train_tokenizer(iter([DOCUMENTS]), 300, tmp_path / "one")
    train_tokenizer(([text] for text in DOCUMENTS), 300, tmp_path / "two")
    expected = (tmp_path / "one" / "tokenizer.json").read_bytes()
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == expected
    (tmp_path / "text.json").write_text(json.dumps(DOCUMENTS))
    program = (
        "import json, sys; from pathlib import Path\n"
        "from dilocox.data.tokenizer import train_tokenizer\n"
        "folder = Path(sys.argv[1])\n"
        "text = json.loads((folder / 'text.json').read_text())\n"
        "train_tokenizer(iter([text]), 300, folder / 'three')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=True,
        env={"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "5"},
        timeout=240,
    )
    assert (tmp_path / "three" / "tokenizer.json").read_bytes() == expected


def test_smallest_vocabulary_is_the_bytes(tmp_path: Path) -> None:
    encoder = train_tokenizer(iter([DOCUMENTS]), 257, tmp_path / "t")
    [ids] = encoder.encode(["é!"])
    assert len(ids) == 3


def test_trained_tokenizer_loads_with_transformers(files: TokenFiles) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(files.tokenizer_folder)
    assert loaded.is_fast
    assert (loaded.eos_token, loaded.eos_token_id) == (END_OF_TEXT, files.end_of_text)
    assert len(loaded) == files.vocabulary_size
    assert loaded.unk_token is None
    plain = Tokenizer.from_file(str(files.tokenizer_folder / "tokenizer.json"))
    text = "Story 7. river  stone\n\tnorth é"
    assert loaded(text)["input_ids"] == plain.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text


def test_loaded_tokenizer_makes_the_same_tokens_from_any_folder(
    files: TokenFiles, corpus: Path, tmp_path: Path
) -> None:
    digests = set()
    for name in ("one", "two"):
        place = tmp_path / name / "tokenizer"
        place.mkdir(parents=True)
        for path in files.tokenizer_folder.iterdir():
            (place / path.name).write_bytes(path.read_bytes())
        data = section(corpus, tokenizer=str(place), vocabulary_size=4096)
        loaded = prepare(data, tmp_path / name / "data", seed=0)
        loaded.verify()
        assert loaded.vocabulary_size == 300
        assert loaded.content["splits"] == files.content["splits"]
        digests.add(loaded.digest)
    assert len(digests) == 1
    assert digests != {files.digest}


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer .*nope: no such folder"):
        load_tokenizer(str(tmp_path / "nope"), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"empty: cannot be loaded \(.*\); check the name"
    ) as caught:
        load_tokenizer(str(tmp_path / "empty"), tmp_path / "out")
    assert "\n" not in str(caught.value)
    bare = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel()
    (tmp_path / "bare").mkdir()
    bare.save(str(tmp_path / "bare" / "tokenizer.json"))
    (tmp_path / "bare" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(DataError, match="bare: has no end-of-text token; set eos_token"):
        load_tokenizer(str(tmp_path / "bare"), tmp_path / "out")


def test_a_revision_belongs_to_hub_names(
    files: TokenFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(files.tokenizer_folder)
    asked: list[tuple[str, str | None]] = []

    def fake(name: str, revision: str | None = None, **_: object) -> object:
        if isinstance(name, str):  # not what was written, read again
            asked.append((name, revision))
        return loaded

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fake)
    folder = tmp_path / "mo@del"
    folder.mkdir()
    names = ["team/tiny", "team/tiny@v2", str(folder), f"{folder}@v2"]
    for number, name in enumerate(names):
        load_tokenizer(name, tmp_path / str(number))
    assert asked == [
        ("team/tiny", "main"),
        ("team/tiny", "v2"),
        (str(folder), None),
        (str(folder), None),
    ]


def with_template(source: Path, folder: Path, template: str) -> Path:
    """The tokenizer in `source` with special tokens around every text, as hub models have them."""
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_file(str(source / "tokenizer.json"))
    names = ["<g>", "<s>", END_OF_TEXT]
    inner.add_special_tokens(names)
    ids = [(name, inner.token_to_id(name)) for name in names]
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token=END_OF_TEXT
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("<s> $A", ["<s>"]),
        (f"<s> $A {END_OF_TEXT}", ["<s>"]),
        ("<g> <s> $A", ["<g>", "<s>"]),
        ("$A", []),
        (f"$A {END_OF_TEXT}", []),
        # The token that closes the document before begins the next one already.
        (f"{END_OF_TEXT} $A", []),
    ],
)
def test_documents_begin_as_the_models_tokenizer_has_it(
    files: TokenFiles, corpus: Path, tmp_path: Path, template: str, begin: list[str]
) -> None:
    from transformers import AutoTokenizer

    place = with_template(files.tokenizer_folder, tmp_path / "tokenizer", template)
    made = prepare(section(corpus, tokenizer=str(place)), tmp_path / "data", seed=0)
    made.verify()
    assert [each["token"] for each in made.content.get("begin_of_text", [])] == begin
    assert ("begin_of_text" in made.content) == bool(begin)  # else the digest is as it always was
    tokens = made.tokens("train").gather(np.array([0]), made.token_count("train"))[0].tolist()
    published = AutoTokenizer.from_pretrained(made.tokenizer_folder)
    start = 0
    for end in made.document_ends("train").tolist():
        document = tokens[start:end]
        text = published.decode(document, skip_special_tokens=True)
        wanted = [id_ for id_ in published(text)["input_ids"] if id_ != made.end_of_text]
        assert document == [*wanted, made.end_of_text]
        start = end
    assert start == len(tokens)
    assert len(made.document_ends("train")) == made.document_count("train")
    said = f"begin of text {' '.join(begin)}"
    assert (said in show(made)) == bool(begin)
    assert ("each begun by token" in croissant(made.content)["description"]) == bool(begin)


def test_begin_of_text_can_be_left_out(files: TokenFiles, corpus: Path, tmp_path: Path) -> None:
    place = with_template(files.tokenizer_folder, tmp_path / "tokenizer", "<s> $A")
    data = section(corpus, tokenizer=str(place), begin_of_text=False)
    bare = prepare(data, tmp_path / "bare", seed=0)
    assert "begin_of_text" not in bare.content
    assert bare.content["splits"] == files.content["splits"]
    with pytest.raises(DataError, match="begin_of_text False instead of True"):
        prepare(section(corpus, tokenizer=str(place)), tmp_path / "bare", seed=0)


@pytest.mark.parametrize("begins", [True, False])
def test_prompts_without_a_template_begin_as_text_does(
    files: TokenFiles, tmp_path: Path, begins: bool
) -> None:
    place = with_template(files.tokenizer_folder, tmp_path / "tokenizer", "<s> $A")
    pairs = [{"prompt": f"stone {number}", "completion": f" river {number}"} for number in range(9)]
    source = str(write_records(tmp_path / "pairs.jsonl", pairs))
    data = section(source, tokenizer=str(place), format="instruction", begin_of_text=begins)
    made = prepare(data, tmp_path / "data", seed=0)
    first = made.tokens("train").gather(np.array([0]), 1)[0].tolist()
    begin = load_tokenizer(str(place), tmp_path / "again").begin_of_text
    assert (first == list(begin)) == begins
    assert ("begin_of_text" in made.content) == begins


def test_token_files_of_before_have_no_begin_of_text(
    files: TokenFiles, corpus: Path, tmp_path: Path
) -> None:
    """What an earlier version made without knowing of it stays what it was."""
    place = with_template(files.tokenizer_folder, tmp_path / "tokenizer", "<s> $A")
    data = section(corpus, tokenizer=str(place), begin_of_text=False)
    old = prepare(data, tmp_path / "old", seed=0)
    made_with = dict(old.manifest["made_with"])
    made_with["options"] = {**made_with["options"]}
    del made_with["options"]["begin_of_text"]
    (old.folder / MANIFEST).write_text(render(old.content, made_with))
    again = prepare(section(corpus, tokenizer=str(place)), old.folder, seed=0)
    assert again.digest == old.digest
    assert "begin of text" not in show(again)
