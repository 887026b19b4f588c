"""Token files with flags, from token ids alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from dilocox.data import TokenFiles
from dilocox.data.manifest import write_manifest
from dilocox.data.packing import Packer
from dilocox.data.token_files import SPLITS, TOKENIZER

Document = tuple[Sequence[int], Sequence[int]]
"""The token ids of a document, and for each whether it counts as a label."""


def write_flagged(
    folder: Path,
    like: TokenFiles,
    train: Sequence[Document],
    validation: Sequence[Document],
    shard_bytes: int = 1 << 20,
) -> TokenFiles:
    """Token files of these documents, with the tokenizer and the sources of `like`."""
    folder.mkdir()
    shutil.copytree(like.tokenizer_folder, folder / TOKENIZER)
    entries = {}
    for split, documents in zip(SPLITS, (train, validation), strict=True):
        packer = Packer(folder, split, like.vocabulary_size, None, shard_bytes, flagged=True)
        packer.add(
            [ids for ids, _ in documents],
            sum(len(ids) for ids, _ in documents),
            [(0, 0)] * len(documents),
            [counted for _, counted in documents],
        )
        packer.close()
        entries[split] = packer.describe()
    write_manifest(folder, like.content | {"splits": entries}, like.manifest["made_with"])
    return TokenFiles.open(folder)
