"""Small tokenizers of every kind, with special tokens of chat templates, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
"""Special tokens of every tokenizer of this module. `<unk>` is the unknown token."""

WORDS = (
    "the quick brown fox jumps over a lazy dog user assistant system tool hello world What is "
    "two plus three It is five im start end INST s think unk < > | / [ ] . , ? ! 0 1 2 3 4 5"
)
TEXT = [WORDS[n:] + WORDS[:n] for n, letter in enumerate(WORDS) if letter == " "] * 3

THINK = AddedToken("<think>", special=False, normalized=False)
"""Added token that is not special, as models have it for what they write themselves."""


def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """BPE with bytes for unknown characters and a space before the text, as Llama 2 has it."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=[*SPECIAL, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    # Bytes are tokens of the model alone, not added ones.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        each for each in content["added_tokens"] if each["content"] in SPECIAL
    ]
    return Tokenizer.from_str(json.dumps(content))


def metaspace() -> Tokenizer:
    """BPE with a space before the first piece only, as Mistral's later tokenizers have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with a space before every piece, as T5 has it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece in lower case, as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """One token per word between spaces: names of special tokens are words, too."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
    "unigram": unigram,
    "word-piece": word_piece,
    "word-level": word_level,
}


def save(tokenizer: Tokenizer, folder: Path, template: str | None = None) -> Path:
    """Write a tokenizer's folder as transformers does, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_tokens([THINK])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = template
    made.save_pretrained(folder)
    return folder
