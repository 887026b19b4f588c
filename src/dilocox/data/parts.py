"""The parts of splits: each of several sources has one part of a split, with its own documents."""

from __future__ import annotations

import hashlib
from typing import Any

from dilocox.data.token_files import TokenArray, TokenFiles


class PartFiles(TokenFiles):
    """One source's part of one split, with the interface of whole token files.

    Only the split of the part can be asked for.
    """

    def __init__(self, files: TokenFiles, split: str, number: int) -> None:
        """Prepare to read part `number` of `split` of `files`."""
        super().__init__(files.folder, files.manifest)
        parts = files.content["splits"][split]["parts"]
        self._files, self._split, self._part = files, split, parts[number]
        self._first = sum(part["tokens"] for part in parts[:number])
        self.name: str = self._part["name"]
        self.first_document: int = sum(part["documents"] for part in parts[:number])
        """Number of the part's first document in the split."""
        self.key = f'data.sources "{self.name}"'
        # Every part has an order of its own.
        said = f"dilocox/parts/1|{files.digest}|{self.name}"
        self.digest = hashlib.sha256(said.encode()).hexdigest()

    def tokens(self, split: str) -> TokenArray:
        """Returns the tokens of the part."""
        return self._files.tokens(self._own(split)).window(self._first, self._part["tokens"])

    def flags(self, split: str) -> TokenArray | None:
        """Returns the flags of the part, or None if the tokens have none."""
        flags = self._files.flags(self._own(split))
        return flags and flags.window(self._first, self._part["tokens"])

    def columns(self, split: str) -> dict[str, TokenArray]:
        """Returns the columns of the part by name."""
        whole = self._files.columns(self._own(split))
        first, length = self._first, self._part["tokens"]
        return {name: array.window(first, length) for name, array in whole.items()}

    def token_count(self, split: str) -> int:
        """Returns the number of tokens of the part."""
        self._own(split)
        return int(self._part["tokens"])

    def document_count(self, split: str) -> int:
        """Returns the number of documents of the part."""
        self._own(split)
        return int(self._part["documents"])

    def _own(self, split: str) -> str:
        assert split == self._split
        return split


def parts_of(files: TokenFiles, split: str) -> list[PartFiles]:
    """Returns the parts of a split, in the order of the tokens.

    The list is empty for token files of one source, and for a part of others.
    """
    if isinstance(files, PartFiles):
        return []
    parts: list[dict[str, Any]] = files.content["splits"][split].get("parts", [])
    return [PartFiles(files, split, number) for number in range(len(parts))]
