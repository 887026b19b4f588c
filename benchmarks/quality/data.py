"""Text of the quality benchmark: token files of one corpus and of contiguous parts of it.

The corpus is the source of Python's standard library, in order of path, followed by the available
parts of WikiText-2. It is cut into documents of about `DOCUMENT` characters, so that the held-out
text is spread over the whole corpus. The documents form four contiguous parts of equal size. In
non-IID runs a site trains on its own parts only; in IID runs all sites share the whole corpus.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dilocox.config.data import DataSection
from dilocox.data import TokenFiles, prepare
from dilocox.data.readers import cut_point
from dilocox.data.sources import STDLIB, read_source
from dilocox.utils import processes
from dilocox.utils.storage import replace_file

PARTS = 4
DOCUMENT = 4 * 1024
"""Number of characters after which a document ends at the next blank line."""
SEQUENCE_LENGTH = 128
HELD_OUT_SEQUENCES = 1024
HELD_OUT_FRACTION = 0.02
VOCABULARY = 257
"""The 256 bytes and end-of-text. The tokenizer has no merges."""
WIKITEXT = "wikitext2-*.txt"

Progress = Callable[[str, float], None]


def cut(text: str) -> Iterator[str]:
    """Divide `text` into documents of `DOCUMENT` to 2 x `DOCUMENT` characters, without loss."""
    start = 0
    while (end := cut_point(text, start, DOCUMENT)) is not None:
        yield text[start:end]
        start = end
    yield text[start:]


def contiguous(documents: Sequence[str], parts: int) -> list[Sequence[str]]:
    """Divide `documents`, in order, into `parts` runs of about equally many characters.

    Raises `ValueError` if a part would be empty.
    """
    total = sum(len(document) for document in documents)
    bounds, done = [0], 0
    for index, document in enumerate(documents):
        done += len(document)
        while len(bounds) < parts and done * parts >= total * len(bounds):
            bounds.append(index + 1)
    bounds = [*bounds[:parts], len(documents)]
    runs = [documents[a:b] for a, b in pairwise(bounds)]
    if len(runs) < parts or not all(runs):
        raise ValueError(f"{len(documents)} documents do not fill {parts} parts")
    return runs


def check_wikitext(benchmark: str, folder: Path | None) -> None:
    """End the program if `folder`, as --wikitext names it, has no WikiText."""
    if folder is not None and not any(folder.glob(WIKITEXT)):
        raise SystemExit(f"{benchmark}: --wikitext {folder}: no {WIKITEXT} in it; name its folder")


def write_once(path: Path, lines: Iterable[str]) -> None:
    """Write a file of a work folder, unless it is there already.

    Ends the program if the file is there with another content: the options of this call would name
    one text, and the rows would be of another.
    """
    content = "".join(f"{line}\n" for line in lines).encode()
    if path.exists():
        if path.read_bytes() != content:
            raise SystemExit(
                f"{path.parent}: holds another text than these options ask for; name another "
                "folder by --folder, or remove this one"
            )
        return
    replace_file(path, content)


def read_corpus(wikitext: Path | None) -> list[str]:
    """Return all documents, in order.

    `wikitext`: folder of WikiText. None: the documents are those of the standard library alone.
    """
    sources = [STDLIB]
    if wikitext is not None:
        sources += [str(file) for file in sorted(wikitext.glob(WIKITEXT))]
    return [
        piece
        for source in sources
        for text in read_source(source, DataSection(), _quiet).documents()
        for piece in cut(text)
        if not piece.isspace()
    ]


def _quiet(_step: str, _share: float) -> None:
    """Print no progress."""


@dataclass(frozen=True)
class Text:
    """The corpus in a folder, and its token files, which depend on the seed of a run.

    The seed decides which documents are held out, for the whole corpus and for every site alike: no
    site trains on a held-out document.
    """

    folder: Path

    @classmethod
    def write(cls, folder: Path, wikitext: Path | None) -> Text:
        """Write the parts of the corpus below `folder`, if they do not exist yet."""
        return cls.write_parts(folder, lambda: contiguous(read_corpus(wikitext), PARTS))

    @classmethod
    def write_parts(cls, folder: Path, parts: Callable[[], Sequence[Sequence[str]]]) -> Text:
        """Write `PARTS` parts, each a list of documents, if they do not exist yet.

        Ends the program if the folder has other documents.
        """
        text = cls(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for number, documents in enumerate(parts()):
            write_once(text.part(number), (json.dumps({"text": each}) for each in documents))
        return text

    def part(self, number: int) -> Path:
        """Return the file of part `number`, one of `PARTS`."""
        return self.folder / f"part-{number}.jsonl"

    def parts_of(self, site: int, sites: int) -> list[Path]:
        """Return the parts on which site number `site` of `sites` trains without IID."""
        share = PARTS // sites
        return [self.part(number) for number in range(site * share, (site + 1) * share)]

    def section(self) -> dict[str, object]:
        """Return the section `[data]` of every run, without `folder`."""
        return {
            "source": [str(self.part(number)) for number in range(PARTS)],
            "vocabulary_size": VOCABULARY,
            "sequence_length": SEQUENCE_LENGTH,
            "validation_fraction": HELD_OUT_FRACTION,
            "validation_sequences": HELD_OUT_SEQUENCES,
        }

    def mixture(self, seed: int) -> Path:
        """Return the folder of the token files of the whole corpus."""
        return self.folder / f"seed-{seed}" / "mixture"

    def site(self, seed: int, site: int, sites: int) -> Path:
        """Return the folder of the token files of one site's parts."""
        return self.folder / f"seed-{seed}" / f"site-{site}-of-{sites}"

    def tokenise(self, seed: int, site_counts: Sequence[int]) -> None:
        """Write the token files of `seed`: those of the whole corpus, and of the sites of each
        count.

        Raises `ValueError` if the whole corpus and the parts disagree about held-out documents.
        """
        processes.call_in_child(_tokenise, self, seed, tuple(site_counts), on_progress=_quiet)


def _tokenise(text: Text, seed: int, site_counts: tuple[int, ...], progress: Progress) -> None:
    whole = prepare(DataSection(**text.section()), text.mixture(seed), seed, progress)  # type: ignore[arg-type]
    for sites in site_counts:
        for site in range(sites):
            section = text.section() | {
                "source": [str(path) for path in text.parts_of(site, sites)],
                "tokenizer": str(whole.tokenizer_folder),
            }
            own = prepare(
                DataSection(**section),  # type: ignore[arg-type]
                text.site(seed, site, sites),
                seed,
                progress,
            )
            if own.content["held_out_below"] != whole.content["held_out_below"]:
                raise ValueError(f"{own.folder}: holds out other documents than the whole corpus")


def describe(files: TokenFiles) -> dict[str, int | str]:
    """Return the facts about the text that a reader of the results needs."""
    return {
        "digest": files.digest,
        "train_tokens": files.token_count("train"),
        "held_out_tokens": files.token_count("validation"),
        "held_out_sequences": HELD_OUT_SEQUENCES,
    }
