"""Corpus -> tokenizer -> digested token files -> exact, resumable batches."""

from dilocox.data.prepare import prepare
from dilocox.data.sequences import SequenceSpace, held_out
from dilocox.data.token_files import TokenArray, TokenFiles, show

__all__ = ["SequenceSpace", "TokenArray", "TokenFiles", "held_out", "prepare", "show"]
