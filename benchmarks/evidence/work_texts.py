"""The texts of a benchmark in its work folder: each is written and tokenised once in a call."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence import texts
from benchmarks.evidence.cells import Source
from benchmarks.quality.data import PARTS, Text, contiguous, read_corpus
from dilocox.data import TokenFiles


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program if --texts, --list, --quick and --json do not go together."""
    if options.texts is None and not options.list:
        parser.error("--texts: name the folder of the unseen texts")
    if options.list and options.json is None:
        parser.error("--list: name the results by --json")
    if options.quick and options.json is not None:
        parser.error("--quick: writes no results; leave out --json")


class WorkTexts:
    """The texts below a work folder.

    Args:
        folder: The work folder.
        unseen: The folder of the unseen texts. None: no text is written.
        wikitext: The folder of WikiText. None: `source` is the standard library alone.
    """

    def __init__(self, folder: Path, unseen: Path | None, wikitext: Path | None = None) -> None:
        self._folder = folder
        self._unseen = unseen
        self._wikitext = wikitext
        self._texts: dict[Source, Text] = {}
        self._tokenised: set[tuple[Source, int, tuple[int, ...]]] = set()

    def tokenised(self, source: Source, seed: int, counts: Sequence[int]) -> Text:
        """Return a text with the token files of a seed: of the whole text, and of the sites of each
        number of sites in `counts`."""
        text, key = self._written(source), (source, seed, tuple(counts))
        if key not in self._tokenised:
            text.tokenise(seed, counts)
            self._tokenised.add(key)
        return text

    def digest(self, source: Source, seed: int) -> str:
        """Return the digest of the token files of a whole text, which `tokenised` has written."""
        return TokenFiles.open(self._written(source).mixture(seed)).digest

    def _written(self, source: Source) -> Text:
        if source not in self._texts:
            self._texts[source] = Text.write_parts(
                self._folder / source, lambda: self._parts(source)
            )
        return self._texts[source]

    def _parts(self, source: Source) -> Sequence[Sequence[str]]:
        if source == "source":
            return contiguous(read_corpus(self._wikitext), PARTS)
        assert self._unseen is not None, "the options were checked"
        if source == "mixed":
            return texts.mixed_parts(self._unseen)
        return contiguous(texts.perl_documents(self._unseen), PARTS)
