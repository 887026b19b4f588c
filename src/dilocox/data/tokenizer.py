"""Tokenizers, trained on the corpus or loaded by name, and stored as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dilocox.errors import DataError
from dilocox.utils.file_errors import names_folder

END_OF_TEXT = "<|endoftext|>"
"""End-of-text token of a trained tokenizer."""

# Keys that name the place from which a tokenizer was loaded. These keys do not change the
# tokenizer's behaviour, and differ between machines.
_PLACES = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "is_local", "cache_dir")


@dataclass(frozen=True)
class Encoder:
    """A tokenizer ready to encode documents."""

    tokenizer: Tokenizer
    end_of_text: int
    vocabulary_size: int
    """Largest token id + 1."""
    begin_of_text: tuple[int, ...] = ()
    """Tokens that the tokenizer itself puts before every text, without end-of-text."""

    def encode(self, documents: list[str]) -> list[list[int]]:
        """Returns the token ids of each document.

        Special tokens are not looked for in text. A vocabulary of words or unigrams may make them
        all the same (`special_text.spelled`).
        """
        encodings = self.tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def train_tokenizer(
    documents: Iterable[list[str]],
    vocabulary_size: int,
    folder: Path,
    special: Sequence[str] = (),
) -> Encoder:
    """Train a byte-level BPE tokenizer on batches of documents and write it to `folder`.

    `special` are special tokens beside end-of-text, such as those of a chat template.

    The vocabulary contains all 256 bytes, so every text can be encoded without an unknown token.
    The same documents in the same order give the same file. Raises `DataError` if the text yields
    fewer than `vocabulary_size` tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocabulary_size:
        raise DataError(
            f"data.vocabulary_size {vocabulary_size}: the text yields only {reached} tokens; "
            "give more text or lower the vocabulary size"
        )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)
    return _encoder(folder, END_OF_TEXT)


def names_missing_folder(place: str) -> bool:
    """Returns whether `place` can only be the name of a folder, but the folder does not exist."""
    return names_folder(place) and not Path(place).expanduser().is_dir()


def load_tokenizer(name: str, folder: Path) -> Encoder:
    """Load a tokenizer and write it to `folder`.

    `name` is a local folder, a hub name, or NAME@REVISION. Raises `DataError` if the tokenizer
    cannot be loaded, has no end-of-text token, or has no fast version (`tokenizer.json`).
    """
    # Imported here: transformers costs seconds and is not needed to read token files.
    from transformers import AutoTokenizer

    place, revision = name, "main"
    if "@" in name and not Path(name).expanduser().is_dir():
        place, _, revision = name.rpartition("@")
    local = Path(place).expanduser()
    if names_missing_folder(place):
        raise DataError(
            f"data.tokenizer {name}: no such folder; give an existing one or a hub name"
        )
    try:
        tokenizer = (
            AutoTokenizer.from_pretrained(str(local), trust_remote_code=False)
            if local.is_dir()
            else AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
        )
    except Exception as error:  # OSError, ValueError or KeyError, depending on the folder
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip()
        raise DataError(
            f"data.tokenizer {name}: cannot be loaded ({reason}); check the name and the "
            "connection, or give a local folder"
        ) from None
    if tokenizer.eos_token is None:
        raise DataError(
            f"data.tokenizer {name}: has no end-of-text token; set eos_token in its "
            "tokenizer_config.json"
        )
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"data.tokenizer {name}: has no fast tokenizer (tokenizer.json); use a tokenizer that "
            "has one"
        )
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for key in _PLACES:
        config.pop(key, None)
    _write_json(folder / "tokenizer_config.json", config)
    encoder = _encoder(folder, str(tokenizer.eos_token))
    # Read from the written folder, since this copy is published with the model and encodes prompts.
    written = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return replace(encoder, begin_of_text=_begin_of_text(written, encoder.end_of_text))


def read_tokenizer(folder: Path) -> Encoder:
    """Returns the tokenizer in a folder that transformers wrote, such as a model's.

    Raises `DataError` if it cannot be loaded, has no fast version or no end-of-text token.
    """
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{folder}: has no fast tokenizer (tokenizer.json)")
    try:
        written = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError or KeyError, depending on the folder
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip()
        raise DataError(f"{folder}: its tokenizer cannot be loaded ({reason})") from None
    if written.eos_token is None:
        raise DataError(f"{folder}: its tokenizer has no end-of-text token")
    return _encoder(folder, str(written.eos_token))


def _begin_of_text(tokenizer: Any, end_of_text: int) -> tuple[int, ...]:
    """Returns the token ids that a Hugging Face tokenizer puts before a text.

    End-of-text is left out. In packed documents, the end-of-text of one document already precedes
    the next one, and the token must occur only at the end of documents.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(token for token in whole[:start] if token != end_of_text)
    return ()


def _encoder(folder: Path, end_of_text: str) -> Encoder:
    """Returns an encoder that is read back from `folder`, so that it equals the written files."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(end_of_text)
    if end is None:
        raise DataError(
            f"{folder}: end-of-text token {end_of_text!r} is not in the tokenizer's vocabulary"
        )
    return Encoder(tokenizer, end, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
