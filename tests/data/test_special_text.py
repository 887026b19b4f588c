"""Text that spells special tokens is trained on as text, and its owner is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models

from dilocox.cli import main
from dilocox.data import prepare
from dilocox.data.document_encoding import DocumentEncoder
from dilocox.data.special_text import LOOKED, SpecialText, warning
from dilocox.data.tokenizer import END_OF_TEXT, load_tokenizer, read_tokenizer
from tests.data.conftest import section
from tests.data.tokenizer_kinds import KINDS, SPECIAL, TEXT, save

CHAT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"


def tokenizer(*special: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.add_special_tokens([AddedToken(each, special=True) for each in special])
    made.add_tokens(["<think>"])
    return made


def test_documents_are_counted_by_token() -> None:
    special = SpecialText(tokenizer("<|im_start|>", "<|im_end|>", "<|im_end|>x", "#"))
    special.look([CHAT, "# a title with <think>", "<|im_end|>x alone"])
    special.look(["plain"])
    assert special.found == {"<|im_start|>": 1, "<|im_end|>": 1, "<|im_end|>x": 1}
    assert "<|im_start|> in 1" in warning(special.found)


def test_the_first_documents_tell() -> None:
    special = SpecialText(tokenizer("<|im_end|>"))
    special.look(["plain"] * LOOKED)
    special.look([CHAT])
    assert special.found == {}
    without = SpecialText(tokenizer())
    without.look([CHAT])
    assert without.found == {}


def test_the_owner_of_rendered_chats_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`dilocox data prepare run.toml`, and `dilocox data show` of what it wrote."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(60):
        words = " ".join(f"word{number * n % 97}" for n in range(40))
        mark = END_OF_TEXT if number % 2 else ""
        (text / f"{number}.txt").write_text(words + mark)
    run = tmp_path / "run.toml"
    run.write_text(
        f'[run]\nfolder = "{tmp_path}/run"\n[model.architecture]\nmodel_type = "qwen3"\n'
        f'[data]\nsource = "{text}"\nvocabulary_size = 270\nsequence_length = 8\n[sites.paris]\n'
    )

    def typed(*words: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as end:
            main.main(list(words))
        assert end.value.code == 0
        said = capfd.readouterr()
        return said.out, said.err

    out, err = typed("data", "prepare", str(run))
    assert f"special tokens of the tokenizer as text ({END_OF_TEXT} in 30 of" in err
    assert "warning " in out
    assert f"{END_OF_TEXT} in 30 of" in typed("data", "show", str(tmp_path / "run" / "data"))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_text_never_ends_a_document(kind: str, tmp_path: Path) -> None:
    """Neither by a tokenizer of words, nor by one of unigrams: their vocabulary has the name."""
    names = ["</s>", "<s>", "<|im_end|>"]
    texts = [
        f"the quick brown fox {number} {names[number % 3]} over a lazy dog{names[number % 2]}x"
        for number in range(30)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    source = save(KINDS[kind](), tmp_path / "tokenizer")
    data = section(tmp_path / "a.jsonl", tokenizer=str(source), vocabulary_size=4096)
    files = prepare(data, tmp_path / "data", seed=0)
    tokenizer = read_tokenizer(files.tokenizer_folder).tokenizer
    special = {tokenizer.token_to_id(name) for name in SPECIAL} - {tokenizer.token_to_id("<unk>")}
    for split in ("train", "validation"):
        ends = files.document_ends(split)
        assert len(ends) == files.document_count(split)
        tokens = files.tokens(split).gather(np.zeros(1, dtype=np.int64), files.token_count(split))
        inside = np.delete(tokens[0], ends - 1)
        begin = tokenizer.token_to_id("<s>")
        starts = np.append(0, ends[:-1])
        if files.content.get("begin_of_text"):
            assert (tokens[0][starts] == begin).all()
            inside = np.delete(tokens[0], np.concatenate([ends - 1, starts]))
        assert not special & set(inside.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_such_names_has_the_tokens_of_before(kind: str, tmp_path: Path) -> None:
    source = save(KINDS[kind](), tmp_path / "tokenizer")
    encoder = load_tokenizer(str(source), tmp_path / "copy")
    documents = DocumentEncoder(tmp_path / "copy", section("a.txt"), encoder)
    assert (documents._protected is not None) == (kind in ("unigram", "word-level"))
    texts = [*TEXT[:5], "It is < five >", "a<think>b <think> é 你好", "", " lines\n\nand\ttabs "]
    made = [each.ids for each in documents.encode(texts) if each is not None]
    assert made == encoder.encode(texts)
