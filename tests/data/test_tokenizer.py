from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from dilocox.data import TokenFiles, prepare
from dilocox.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from dilocox.errors import DataError
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
        timeout=60,
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
