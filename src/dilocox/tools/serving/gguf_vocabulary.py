"""The tokens of a GGUF file, from a Hugging Face tokenizer. Pure but for reading the folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.errors import CheckpointError, ConfigError
from dilocox.tools.serving.gguf_families import OTHER_WAY
from dilocox.tools.serving.tokens import end_tokens, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Kinds of tokens in a GGUF file."""
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN_2 = rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}"
"""How the tokenizers of these models cut text before they merge bytes."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says of its tokens."""

    pre: str
    """llama.cpp's name of how text is cut before bytes are merged."""
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    special: dict[str, int] = field(default_factory=dict)
    """Tokens by GGUF's key, such as `bos_token_id`."""
    begins: bool = False
    """Whether text begins with the token `bos_token_id`."""
    ends: bool = False
    """Whether text ends with the token `eos_token_id`."""
    chat_template: str | list[dict[str, str]] | None = None
    """One template, or several with their names."""


def pre_tokenizer(content: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer in `tokenizer.json`. None: it has no name."""
    parts = content.get("pre_tokenizer") or {}
    steps = parts.get("pretokenizers", []) if parts.get("type") == "Sequence" else [parts]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    before, with_words = steps[:-1], steps[-1].get("use_regex", True)
    normal = (content.get("normalizer") or {}).get("type")
    whole = bool(content["model"].get("ignore_merges"))
    if normal not in (None, "NFC") or (whole and before == []):
        return None
    if with_words:
        digits = [{"type": "Digits", "individual_digits": True}]
        return {"[]": "gpt-2", str(digits): "smollm"}.get(str(before)) if not normal else None
    if len(before) != 1 or before[0].get("type") != "Split" or before[0].get("invert"):
        return None
    pattern = before[0].get("pattern", {}).get("Regex")
    if before[0].get("behavior") != "Isolated":
        return None
    if pattern == LLAMA_3 and whole:
        return "llama-bpe"
    return "qwen2" if pattern == QWEN_2 and not whole else None


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Return the vocabulary of a Hugging Face folder, padded to `size` tokens.

    Raises `ConfigError` if GGUF has no form for the tokenizer: it is not a byte-level BPE, or
    llama.cpp has no name for how it cuts text. Raises `CheckpointError` if it cannot be read.
    """
    tokenizer = load_tokenizer(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    pre = pre_tokenizer(content) if model["type"] == "BPE" else None
    if pre is None or model.get("byte_fallback"):
        raise ConfigError(
            f"{folder}: dilocox writes GGUF for byte-level BPE tokenizers that cut text as GPT-2, "
            f"SmolLM, Llama 3 or Qwen 2 do; {OTHER_WAY}"
        )
    largest = max([*model["vocab"].values(), *(each["id"] for each in content["added_tokens"])])
    if largest >= size:
        raise CheckpointError(
            f"{folder}: its tokenizer has token {largest}, but vocab_size of config.json is "
            f"{size}; was the folder changed?"
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return Vocabulary(
        pre,
        tokens,
        kinds,
        [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]],
        _special(tokenizer, folder),
        *_around(tokenizer),
        _templates(tokenizer.chat_template),
    )


def _templates(found: str | dict[str, str] | None) -> str | list[dict[str, str]] | None:
    """Return a tokenizer's chat templates as `Vocabulary` has them."""
    if not isinstance(found, dict):
        return found
    return [{"name": name, "template": text} for name, text in sorted(found.items())]


def _special(tokenizer: Any, folder: Path) -> dict[str, int]:
    """Return special tokens by GGUF's key. A further end of a message is the end of a turn."""
    named = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "unknown_token_id": tokenizer.unk_token_id,
        "padding_token_id": tokenizer.pad_token_id,
    }
    others = [end for end in end_tokens(folder) if end != tokenizer.eos_token_id]
    if others:
        named["eot_token_id"] = others[0]
    return {key: int(number) for key, number in named.items() if number is not None}


def _around(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether the tokenizer puts a token before every text, and one after it."""
    ids = tokenizer("a")["input_ids"]
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins, ends = ids[:1] == [first], len(ids) > 1 and ids[-1:] == [last]
    return first is not None and begins, last is not None and ends
