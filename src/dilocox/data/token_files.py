"""Token files: a folder with memory-mapped token shards, their tokenizer and their manifest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dilocox.data.columns import COLUMN_DTYPE
from dilocox.data.croissant import check_croissant
from dilocox.data.flags import FLAGS_DTYPE, STARTS
from dilocox.data.list_files import HIDDEN
from dilocox.data.manifest import column_names, has_flags, hash_file, read_manifest
from dilocox.data.special_text import warning
from dilocox.errors import DataError

TOKENIZER = "tokenizer"
"""Name of the tokenizer's folder in the folder of token files."""

SCANNED = 1 << 24
"""Tokens that are searched at once."""

SPLITS = ("train", "validation")

Part = npt.NDArray[Any]


class TokenArray:
    """All tokens of one split, in order, memory-mapped from its files and read on access.

    The flags and each column of a split are such an array, too.
    """

    def __init__(self, files: list[Path], counts: list[int], dtype: np.dtype[Any]) -> None:
        """Map `files`, which hold `counts` tokens of `dtype`. All but the last must be equal."""
        self._maps = [np.memmap(file, dtype=dtype, mode="r") for file in files]
        self._per_file = counts[0]
        self._first, self._length = 0, sum(counts)
        self._read_as = np.dtype(np.int64) if dtype.kind == "u" else dtype.newbyteorder("=")

    def __len__(self) -> int:
        return self._length

    def window(self, first: int, length: int) -> TokenArray:
        """Returns the `length` tokens from `first` on as an array of its own, without copying."""
        part = copy.copy(self)
        part._first, part._length = self._first + first, length
        return part

    def gather(self, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        """Returns the `length` tokens at each offset: int64 [len(offsets), length].

        Numbers of a column are float32.

        Raises `IndexError` if a range goes beyond the split.
        """
        tokens = np.empty((len(offsets), length), dtype=self._read_as)
        for row, offset in zip(tokens, offsets.tolist(), strict=True):
            if not 0 <= offset <= self._length - length:
                raise IndexError(f"tokens {offset}..{offset + length} of {self._length}")
            filled = 0
            while filled < length:
                file, start = divmod(self._first + offset + filled, self._per_file)
                part = self._maps[file][start : start + length - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
        return tokens

    def places_of(self, token: int) -> npt.NDArray[np.int64]:
        """Returns the ascending offsets of all occurrences of `token`: int64 [n].

        The whole split is read.
        """
        return self._where(lambda part: part == token)

    def places_with(self, bit: int) -> npt.NDArray[np.int64]:
        """Returns the ascending offsets of all entries that have `bit` set: int64 [n].

        The whole split is read.
        """
        return self._where(lambda part: (part & bit) != 0)

    def count_before(self, bit: int, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns how many entries below each offset have `bit` set: int64 [n].

        `offsets`: ascending, 0 to the length of the split. The whole split is read.
        """
        counts = np.zeros(len(offsets), dtype=np.int64)
        done, total = 0, 0
        for first, some in self._blocks():
            # 32 bits suffice for a block, and take a third of the time of 64.
            sums = np.zeros(len(some) + 1, dtype=np.int32)
            np.cumsum((some & bit) != 0, dtype=np.int32, out=sums[1:])
            end = int(np.searchsorted(offsets, first + len(some), side="right"))
            counts[done:end] = total + sums[offsets[done:end] - first]
            done, total = end, total + int(sums[-1])
        return counts

    def _where(self, test: Callable[[Part], Part]) -> npt.NDArray[np.int64]:
        found = [np.empty(0, dtype=np.int64)]
        for offset, part in self._blocks():
            found.append(np.flatnonzero(test(part)).astype(np.int64) + offset)
        return np.concatenate(found)

    def _blocks(self) -> Iterator[tuple[int, Part]]:
        """Yield (offset, tokens) of consecutive blocks of at most `SCANNED` tokens."""
        base = -self._first
        for part in self._maps:
            low, high = max(0, -base), min(len(part), self._length - base)
            for start in range(low, high, SCANNED):
                yield base + start, part[start : min(high, start + SCANNED)]
            base += len(part)


class TokenFiles:
    """A folder of token files, read-only. `prepare` makes it, `TokenFiles.open` opens it."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.content: dict[str, Any] = manifest["content"]
        self.digest: str = manifest["digest"]
        """SHA-256 (hex) of the content. The same corpus, tokenizer and split have the same digest
        on every machine."""
        self.vocabulary_size: int = self.content["vocabulary_size"]
        """Largest token id + 1. The model's vocabulary must have at least this size."""
        self.end_of_text: int = self.content["end_of_text"]["id"]
        self.tokenizer_folder = folder / TOKENIZER
        """Folder that `AutoTokenizer.from_pretrained` can load."""
        self.dtype = np.dtype(self.content["dtype"]).newbyteorder("<")
        self._arrays: dict[str, TokenArray] = {}
        self._flags: dict[str, TokenArray] = {}
        self._columns: dict[str, dict[str, TokenArray]] = {}
        self.column_names = column_names(self.content)
        """Sorted names of the columns (`data.columns`)."""

    @classmethod
    def open(cls, folder: str | Path) -> TokenFiles:
        """Open a folder of token files.

        Checks the manifest and the size of every file, but not the digests of the files. Raises
        `DataError` if a file is missing or has another size, or if the manifest is invalid.
        """
        folder = Path(folder)
        files = cls(folder, read_manifest(folder))
        for name, size, _ in files._recorded():
            path = folder / name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise DataError(
                    f"{path}: missing or unreadable ({error.strerror}); prepare the data again"
                ) from None
            if found != size:
                raise DataError(
                    f"{path}: {found:,} bytes instead of {size:,}; prepare the data again"
                )
        return files

    def tokens(self, split: str) -> TokenArray:
        """Returns the tokens of split `train` or `validation`."""
        if split not in self._arrays:
            shards = self.content["splits"][split]["shards"]
            self._arrays[split] = TokenArray(
                [self.folder / shard["file"] for shard in shards],
                [shard["tokens"] for shard in shards],
                self.dtype,
            )
        return self._arrays[split]

    @property
    def has_flags(self) -> bool:
        """Whether the tokens have flags (`data.flags`). Token files of text have none."""
        return has_flags(self.content)

    @property
    def has_pairs(self) -> bool:
        """Whether every document is a pair of answers."""
        return bool(self.content.get("conversations", {}).get("format") == "preference")

    def flags(self, split: str) -> TokenArray | None:
        """Returns the flags of a split, one per token, or None if the tokens have none."""
        if not self.has_flags:
            return None
        if split not in self._flags:
            shards = self.content["splits"][split]["shards"]
            self._flags[split] = TokenArray(
                [self.folder / shard["flags"]["file"] for shard in shards],
                [shard["tokens"] for shard in shards],
                FLAGS_DTYPE,
            )
        return self._flags[split]

    def columns(self, split: str) -> dict[str, TokenArray]:
        """Returns the columns of a split by name, one float32 per token; empty without columns."""
        if split not in self._columns:
            shards = self.content["splits"][split]["shards"]
            self._columns[split] = {
                name: TokenArray(
                    [self.folder / shard["columns"][name]["file"] for shard in shards],
                    [shard["tokens"] for shard in shards],
                    COLUMN_DTYPE,
                )
                for name in self.column_names
            }
        return self._columns[split]

    def token_count(self, split: str) -> int:
        """Returns the number of tokens in a split, including end-of-text tokens."""
        return int(self.content["splits"][split]["tokens"])

    def document_count(self, split: str) -> int:
        """Returns the number of documents in a split."""
        return int(self.content["splits"][split]["documents"])

    def document_ends(self, split: str) -> npt.NDArray[np.int64]:
        """Returns the end offset of each document of a split, end-of-text included: int64 [n]."""
        flags = self.flags(split)
        if flags is not None:
            starts = flags.places_with(STARTS)
            return np.append(starts[1:], len(flags))[: len(starts)]
        # Text is never encoded as the end-of-text token; only the packer writes it.
        return self.tokens(split).places_of(self.end_of_text) + 1

    @property
    def ends_of_turn(self) -> tuple[int, ...]:
        """Tokens that end a message of the assistant; none if the documents are text."""
        about = self.content.get("conversations", {})
        return tuple(end["id"] for end in about.get("end_of_turn", []))

    @property
    def left_out(self) -> int:
        """Number of source files that were left out, without hidden files. `show` gives reasons."""
        by_source = self.manifest["made_with"].get("left_out", [])
        other = sum(n for left in by_source for reason, n in left.items() if reason != HIDDEN)
        skipped = sum(each.get("skipped_files", 0) for each in self.content["sources"])
        return int(other + skipped)

    @property
    def records_left_out(self) -> int:
        """Number of records without text, without messages, or of which no token is learned."""
        empty = sum(self.manifest["made_with"].get("without_text", []))
        return int(empty + self.content.get("conversations", {}).get("without_labels", 0))

    @property
    def filtered(self) -> tuple[int, int] | None:
        """Records that filters took, and records that were read for them. None: no filters."""
        counts = [each for each in self.manifest["made_with"].get("filtered", []) if each]
        if not counts:
            return None
        return sum(taken for taken, _ in counts), sum(read for _, read in counts)

    @property
    def warnings(self) -> list[str]:
        """Warnings about the text, for the user, one line each."""
        spelled = self.manifest["made_with"].get("special_text")
        return [f"{self.folder}: {warning(spelled)}"] if spelled else []

    def verify(self, progress: Callable[[str, float], None] | None = None) -> None:
        """Compute the digest of every file again and compare it with the manifest.

        `progress` is called with "verifying" and the finished fraction, 0 to 1. Raises `DataError`
        that names the first file with another digest.
        """
        check_croissant(self.folder, read_manifest(self.folder)["content"])
        recorded = self._recorded()
        total = sum(size for _, size, _ in recorded)
        done = 0
        for name, size, sha256 in recorded:
            if hash_file(self.folder / name) != sha256:
                raise DataError(
                    f"{self.folder / name}: its digest differs from the manifest; prepare the data "
                    "again"
                )
            done += size
            if progress is not None:
                progress("verifying", done / total)

    def _recorded(self) -> list[tuple[str, int, str]]:
        """Returns (name in the folder, bytes, SHA-256) of every file that the manifest lists."""
        shards = [shard for split in SPLITS for shard in self.content["splits"][split]["shards"]]
        recorded = [
            (shard["file"], shard["tokens"] * self.dtype.itemsize, shard["sha256"])
            for shard in shards
        ]
        recorded += [
            (shard["flags"]["file"], shard["tokens"], shard["flags"]["sha256"])
            for shard in shards
            if "flags" in shard
        ]
        recorded += [
            (column["file"], shard["tokens"] * COLUMN_DTYPE.itemsize, column["sha256"])
            for shard in shards
            for _, column in sorted(shard.get("columns", {}).items())
        ]
        for name, file in sorted(self.content["tokenizer"]["files"].items()):
            recorded.append((f"{TOKENIZER}/{name}", file["bytes"], file["sha256"]))
        return recorded
