"""Corpus -> tokenizer -> digested token files -> exact, resumable batches."""

from dilocox.data.files import TokenArray, TokenFiles, show
from dilocox.data.prepare import prepare
from dilocox.data.sequences import SequenceSpace, held_out

__all__ = ["SequenceSpace", "TokenArray", "TokenFiles", "held_out", "prepare", "show"]
