"""Text that spells special tokens is trained on as text, and its owner is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from dilocox.cli import main
from dilocox.data.special_text import LOOKED, SpecialText, warning
from dilocox.data.tokenizer import END_OF_TEXT

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
