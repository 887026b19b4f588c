"""Shows one document of token files as text, with marks around what is learned."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from tokenizers import Tokenizer

from dilocox.data.flags import COUNTED
from dilocox.data.token_files import TokenFiles
from dilocox.errors import DataError

OPEN, CLOSE = "[[", "]]"
"""Marks around tokens that are learned."""


def example(files: TokenFiles, number: int) -> str:
    """Returns lines that show document `number`, from 0, of the training split.

    Parts that are learned stand between `OPEN` and `CLOSE`. Raises `DataError` if there is no such
    document.
    """
    count = files.document_count("train")
    if not 0 <= number < count:
        raise DataError(
            f"{files.folder}: no document {number}; give a number from 0 to {count - 1}"
        )
    ends = files.document_ends("train")
    start = int(ends[number - 1]) if number else 0
    length = int(ends[number]) - start
    at = np.array([start])
    ids = files.tokens("train").gather(at, length)[0].tolist()
    flags = files.flags("train")
    learned = [True] * length
    if flags is not None:
        learned = (flags.gather(at, length)[0] & COUNTED).astype(bool).tolist()
    tokenizer = Tokenizer.from_file(str(files.tokenizer_folder / "tokenizer.json"))
    head = (
        f"document {number} of {count:,} in the training split: {length:,} tokens, "
        f"{sum(learned):,} learned (between {OPEN} and {CLOSE})"
    )
    return f"{head}\n{marked(tokenizer, ids, learned)}"


def marked(tokenizer: Tokenizer, ids: list[int], learned: list[bool]) -> str:
    """Returns the text of tokens, special tokens included, with marks around what is learned."""
    parts, start, before = [], 0, ""
    for counts, group in groupby(learned):
        end = start + len(list(group))
        # A part is decoded behind what stands before it: some decoders drop a space at the start.
        whole = _decoded(tokenizer, ids[:end])
        part = _decoded(tokenizer, ids[start:end])
        if whole.startswith(before):
            part = whole[len(before) :]
        parts.append(f"{OPEN}{part}{CLOSE}" if counts else part)
        start, before = end, whole
    return "".join(parts)


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))
