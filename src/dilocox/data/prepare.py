"""Makes token files from a corpus and a tokenizer.

Each step reads the text once, with bounded memory.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tokenizers

from dilocox.config.data import CONVERSATION_KEYS, DataSection
from dilocox.data.chat_encoding import check_same_template, chosen_template, write_template
from dilocox.data.chat_template import marks_of
from dilocox.data.conversations import Conversation
from dilocox.data.croissant import write_croissant
from dilocox.data.document_encoding import DocumentEncoder
from dilocox.data.folder import check_place, partial_folder, publish, reuse
from dilocox.data.hub import HubSource, on_hub
from dilocox.data.manifest import (
    MANIFEST,
    digest_of,
    format_of,
    hash_file,
    source_names,
    write_manifest,
)
from dilocox.data.packing import Packer, Place
from dilocox.data.protected_tokens import Encoded
from dilocox.data.rows import describe_rows
from dilocox.data.sequences import check_lengths
from dilocox.data.sources import Source, read_source
from dilocox.data.token_files import SPLITS, TOKENIZER, TokenFiles
from dilocox.data.tokenizer import Encoder, load_tokenizer, train_tokenizer
from dilocox.errors import DataError
from dilocox.version import __version__

SAMPLE_BYTES = 64 * 1024 * 1024
"""Most bytes of text that a tokenizer is trained on. More text changes little and costs memory."""

BATCH_CHARACTERS = 4 * 1024 * 1024
"""Characters that are encoded at once. This bounds the memory."""

RANGE = 1 << 64
"""Scores of documents are in 0..RANGE-1."""

# Keys of `[data]` that do not change the token files, only how they are read.
_READING = {"folder", "sequence_length", "validation_sequences", "packing", "long_documents"}

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class HoldoutSplit:
    """The rule that decides which documents are held out.

    A document is held out if its score is below `below`. The score is a hash of the seed and the
    text. So it does not depend on the document's position, and two copies of a document are always
    in the same split.
    """

    seed: int
    below: int
    own_from: int | None = None
    """If not None: all documents of sources with this number or a higher one are held out, and no
    document of the other sources."""

    def holds_out(self, place: Place, raw: bytes) -> bool:
        """Returns whether the document with origin `place` and UTF-8 text `raw` is held out."""
        if self.own_from is not None:
            return place[0] >= self.own_from
        return self.scores(raw)[0] < self.below

    def training(self, sources: list[Source]) -> list[Source]:
        """Returns the sources that are trained on."""
        return sources[: self.own_from]

    def scores(self, raw: bytes) -> tuple[int, int]:
        """Returns two independent scores of a document with UTF-8 text `raw`."""
        digest = hashlib.sha256(f"dilocox/held-out/1|{self.seed}|".encode() + raw).digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")

    def settled(self, documents: Iterator[str]) -> HoldoutSplit:
        """Returns this rule with `below` changed so that both splits have a document.

        The change is as small as possible. Reading stops as soon as both splits have a document.
        Raises `DataError` if there are fewer than two different documents.
        """
        least, most = RANGE, -1
        for text in documents:
            score, _ = self.scores(text.encode())
            least, most = min(least, score), max(most, score)
            if least < self.below <= most:
                return self
        if most < 0:
            raise DataError("data.source: no text in the sources; name files that contain text")
        if least == most:
            raise DataError(
                "data.source: one document is not enough, since some documents must be held out; "
                "give more text"
            )
        return HoldoutSplit(self.seed, min(max(self.below, least + 1), most))


def prepare(
    data: DataSection,
    folder: Path,
    seed: int,
    progress: Progress | None = None,
    changed: Callable[[str], None] | None = None,
) -> TokenFiles:
    """Make the token files of `data` in `folder`, or open them if they exist already.

    The folder is created atomically: it is complete or does not exist.

    Args:
        data: `[data]` of the run file.
        folder: folder of the token files.
        seed: seed that decides which documents are held out.
        progress: is called with the name of a step and its finished fraction, 0 to 1.
        changed: see `reuse`; passed by a run that resumes.

    Raises:
        DataError: if text is missing, unreadable, empty or too short, or if `folder` holds other
            files or is a mount point.
    """
    check_place(folder)
    unused = frozenset() if data.has_conversations else CONVERSATION_KEYS.keys()
    options = data.model_dump(mode="json", exclude=_READING | unused) | {"seed": seed}
    names, own_from = _names(data)
    if (folder / MANIFEST).is_file():
        files = reuse(folder, data, names, options, changed)
        check_same_template(data, files.tokenizer_folder, changed)
        check_lengths(files, data.rows)
        return files
    report = progress or _silent
    # If `folder` is a link, the files go to the disk of its target.
    place = Path(os.path.realpath(folder))
    held_data = data.model_copy(update={"split": data.validation_split})
    sources: list[Source] = []
    for number, name in enumerate(names):
        as_said = data if own_from is None or number < own_from else held_data
        hub = on_hub(name, data)
        sources.append(HubSource(name, as_said) if hub else read_source(name, data, report))
    try:
        with partial_folder(place) as partial:
            total = _total(sources, data, report, own_from)
            _check_disk(total, partial)
            held = _held(data, seed, sources, own_from)
            content, spelled = _fill(partial, data, held, sources, total, report)
            write_croissant(partial, content)
            made_with = _made_with(options, sources) | {"special_text": dict(spelled)}
            made_with |= _rows(partial, content, data)
            write_manifest(partial, content, made_with)
            check_lengths(TokenFiles.open(partial), data.rows)
            if publish(partial, place):
                return TokenFiles.open(folder)
    except OSError as error:
        raise DataError(
            f"{folder}: token files cannot be written ({error.strerror}); name another folder or "
            "make room"
        ) from None
    return reuse(folder, data, names, options, changed)


def _silent(step: str, share: float) -> None:
    """Progress callback that does nothing."""


def _names(data: DataSection) -> tuple[list[str], int | None]:
    """Returns the names of all sources, and the number of the first source that is held out.

    The number is None if there is no `data.validation_source`.
    """
    names = source_names({"source": data.source})
    if not names:
        raise DataError(
            'data.source: missing; name files or folders of text, or "python-stdlib" for a corpus '
            "that every machine has"
        )
    own = source_names({"validation_source": data.validation_source})
    return names + own, len(names) if own else None


def _held(
    data: DataSection, seed: int, sources: list[Source], own_from: int | None
) -> HoldoutSplit:
    if own_from is not None:
        return HoldoutSplit(seed, 0, own_from)
    below = int(data.validation_fraction * RANGE)
    return HoldoutSplit(seed, below).settled(_documents(sources, data))


def _fill(
    partial: Path,
    data: DataSection,
    held: HoldoutSplit,
    sources: list[Source],
    total: int | None,
    report: Progress,
) -> tuple[dict[str, Any], Mapping[str, int]]:
    """Write the tokenizer and the shards into `partial`.

    Returns the manifest's content, and the number of documents that contain special tokens as text,
    by token.
    """
    encoder, tokenizer = _make_tokenizer(partial / TOKENIZER, data, sources, held, total, report)
    documents = DocumentEncoder(partial / TOKENIZER, data, encoder)
    splits = _encode(partial, data, _Text(sources, held, total), documents, report)
    documents.check_labels({split: packer.counted for split, packer in splits.items()})
    content = {
        "dtype": splits["train"].dtype.name,
        "vocabulary_size": encoder.vocabulary_size,
        "end_of_text": _named(encoder, encoder.end_of_text),
        "tokenizer": tokenizer,
        "seed": held.seed,
        "validation_fraction": data.validation_fraction if held.own_from is None else 0.0,
        "held_out_below": f"{held.below:016x}",
        "max_documents": data.max_documents,
        "splits": {split: splits[split].describe() for split in SPLITS},
        "sources": [source.describe() for source in sources],
    }
    if held.own_from is not None:
        content["validation_from"] = held.own_from
    if documents.begin_of_text:
        content["begin_of_text"] = [_named(encoder, token) for token in documents.begin_of_text]
    if data.has_conversations:
        content["conversations"] = documents.describe()
    return content, documents.special_text


def _named(encoder: Encoder, token: int) -> dict[str, Any]:
    return {"token": encoder.tokenizer.id_to_token(token), "id": token}


def _make_tokenizer(
    folder: Path,
    data: DataSection,
    sources: list[Source],
    held: HoldoutSplit,
    total: int | None,
    report: Progress,
) -> tuple[Encoder, dict[str, Any]]:
    template = chosen_template(data)
    if data.tokenizer == "train":
        sample = Sample(held.training(sources), data, held, total, report)
        marks = marks_of(template or "")
        encoder = train_tokenizer(sample.batches(), data.vocabulary_size, folder, marks)
        report("training the tokenizer", 1.0)
        entry: dict[str, Any] = {
            "kind": "trained",
            "sample": {"bytes": sample.bytes, "documents": sample.documents},
        }
    else:
        encoder = load_tokenizer(data.tokenizer, folder)
        entry = {"kind": "loaded"}
    if template is not None:
        write_template(folder, template)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entry["files"] = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hash_file(path),
        }
        for path in files
    }
    return encoder, entry


class Sample:
    """The text that a tokenizer is trained on: about `SAMPLE_BYTES` of the training documents.

    If local files hold more, documents are chosen by their second score, so that they are spread
    over the whole corpus. The size of hub datasets is unknown, so their first documents are taken.
    """

    def __init__(
        self,
        sources: list[Source],
        data: DataSection,
        held: HoldoutSplit,
        total: int | None,
        report: Progress,
    ) -> None:
        self.bytes = self.documents = 0
        self._sources, self._data, self._held, self._report = sources, data, held, report
        self._total = total
        share = min(1.0, SAMPLE_BYTES / self._total) if self._total else 1.0
        self._below = int(share * RANGE)

    def batches(self) -> Iterator[list[str]]:
        """Yield documents in batches of about `BATCH_CHARACTERS`."""
        expected = min(self._total or SAMPLE_BYTES, SAMPLE_BYTES)
        for batch in _batches(_documents(self._sources, self._data)):
            taken = []
            for text in batch:
                raw = text.encode()
                score, second = self._held.scores(raw)
                if score < self._held.below or second >= self._below:
                    continue
                taken.append(text.texts() if isinstance(text, Conversation) else text)
                self.bytes += len(raw)
                self.documents += 1
            self._report("training the tokenizer", min(0.99, self.bytes / expected))
            if taken:
                yield taken
            if self.bytes >= SAMPLE_BYTES:
                return


@dataclass(frozen=True)
class _Text:
    """The documents that a folder of token files is made of."""

    sources: list[Source]
    held: HoldoutSplit
    """Which documents are held out."""
    total: int | None
    """Bytes of all documents; None: unknown."""


def _encode(
    partial: Path,
    data: DataSection,
    text: _Text,
    documents: DocumentEncoder,
    report: Progress,
) -> dict[str, Packer]:
    packers = {split: documents.packer(partial, split) for split in SPLITS}
    done = 0
    try:
        places: list[Place] = []
        for batch in _batches(_noting(places, _placed(text.sources, data, text.held.own_from))):
            parts: dict[str, list[Encoded]] = {split: [] for split in SPLITS}
            origins: dict[str, list[Place]] = {split: [] for split in SPLITS}
            sizes = dict.fromkeys(SPLITS, 0)
            for document, made, place in zip(batch, documents.encode(batch), places, strict=True):
                raw = document.encode()
                done += len(raw)
                if made is None:
                    continue
                split = "validation" if text.held.holds_out(place, raw) else "train"
                parts[split].append(made)
                origins[split].append(place)
                sizes[split] += len(raw)
            places.clear()
            for split in SPLITS:
                ids, counted = zip(*parts[split], strict=True) if parts[split] else ((), ())
                said = counted if packers[split].flagged else None
                packers[split].add(ids, sizes[split], origins[split], said)
            report("encoding", min(0.99, done / text.total) if text.total else 0.0)
    finally:
        for packer in packers.values():
            packer.close()
    report("encoding", 1.0)
    return packers


def _documents(sources: list[Source], data: DataSection) -> Iterator[str]:
    return (text for _, text in _placed(sources, data))


def _placed(
    sources: list[Source], data: DataSection, own_from: int | None = None
) -> Iterator[tuple[Place, str]]:
    """Yield (origin, text) of every document.

    `data.max_documents` limits the documents of sources that are trained on. The documents of
    sources from `own_from` on, which are held out, come last and are not limited.
    """
    first = len(sources) if own_from is None else own_from
    training = islice(_each(sources[:first], 0), data.max_documents)
    return chain(training, _each(sources[first:], first))


def _each(sources: list[Source], first: int) -> Iterator[tuple[Place, str]]:
    for number, source in enumerate(sources, first):
        for file, text in source.placed():
            yield (number, file), text


def _noting(places: list[Place], placed: Iterator[tuple[Place, str]]) -> Iterator[str]:
    """Yield the documents, and append the origin of each to `places`."""
    for place, text in placed:
        places.append(place)
        yield text


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _total(
    sources: list[Source], data: DataSection, report: Progress, own_from: int | None
) -> int | None:
    """Returns the bytes that will be read of all sources, or None if a source's size is unknown.

    If `data.max_documents` may end the reading early and there are more than `SAMPLE_BYTES`, the
    text is read once more to count its bytes.
    """
    total = 0
    for source in sources:
        if source.size is None:
            return None
        total += source.size
    if data.max_documents is None or total <= SAMPLE_BYTES:
        return total
    first = len(sources) if own_from is None else own_from
    total = sum(source.size or 0 for source in sources[first:])
    for number, text in enumerate(_documents(sources[:first], data)):
        total += len(text.encode())
        if number % 1024 == 0:
            report("counting documents", number / data.max_documents)
    report("counting documents", 1.0)
    return total


def _check_disk(total: int | None, folder: Path) -> None:
    """Raise `DataError` if the token files of `total` bytes of text cannot fit on the disk."""
    # A token has at least 2 bytes, and few tokenizers put more than 5 bytes of text in a token.
    least = total * 2 // 5 if total is not None else 0
    free = shutil.disk_usage(folder).free
    if free < least:
        raise DataError(
            f"{folder.parent}: token files need {least / 1e9:.1f} GB or more, but only "
            f"{free / 1e9:.1f} GB are free; make room or set data.folder"
        )


def _rows(partial: Path, content: dict[str, Any], data: DataSection) -> dict[str, Any]:
    """Returns the key `rows` of `made_with`, empty for a stream of labels alone."""
    manifest = {"format": format_of(content), "digest": digest_of(content), "content": content}
    described = describe_rows(TokenFiles(partial, manifest), data.rows)
    return {} if described is None else {"rows": described}


def _made_with(options: dict[str, Any], sources: list[Source]) -> dict[str, Any]:
    return {
        "options": options,
        # By source. These counts are not in the content, since they do not change the tokens.
        "left_out": [dict(source.left_out) for source in sources],
        "without_text": [source.without_text for source in sources],
        "dilocox": __version__,
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
    }
