"""Training data: from text and a tokenizer to token files with digests, and numbered sequences."""

from dilocox.data.prepare import prepare
from dilocox.data.sequences import SequenceSpace, held_out
from dilocox.data.show import show
from dilocox.data.token_files import TokenArray, TokenFiles

__all__ = ["SequenceSpace", "TokenArray", "TokenFiles", "held_out", "prepare", "show"]
