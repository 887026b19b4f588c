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
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from dilocox.config.data import CONVERSATION_KEYS, DataSection
from dilocox.data.chat_encoding import check_same_template, chosen_template, write_template
from dilocox.data.chat_template import marks_of
from dilocox.data.conversations import Conversation
from dilocox.data.croissant import write_croissant
from dilocox.data.document_encoding import DocumentEncoder
from dilocox.data.folder import check_place, named_as, partial_folder, publish, reuse, without_unset
from dilocox.data.group_documents import batches, group_texts, placed_batches
from dilocox.data.manifest import MANIFEST, digest_of, format_of, hash_file, write_manifest
from dilocox.data.packing import Packer, Place
from dilocox.data.protected_tokens import Encoded
from dilocox.data.rows import describe_rows
from dilocox.data.sequences import check_lengths
from dilocox.data.source_groups import Group, Progress, named_groups, open_groups
from dilocox.data.sources import Source
from dilocox.data.token_files import SPLITS, TOKENIZER, TokenFiles
from dilocox.data.tokenizer import Encoder, load_tokenizer, train_tokenizer
from dilocox.errors import DataError
from dilocox.utils.formatting import size
from dilocox.version import __version__

SAMPLE_BYTES = 64 * 1024 * 1024
"""Most bytes of text that a tokenizer is trained on. More text changes little and costs memory."""

RANGE = 1 << 64
"""Scores of documents are in 0..RANGE-1."""

# Keys of `[data]` that do not change the token files, only how they are read.
_READING = {"folder", "sequence_length", "validation_sequences", "packing", "long_documents"}


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

    def settled(self, documents: Iterator[str], key: str = "data.source") -> HoldoutSplit:
        """Returns this rule with `below` changed so that both splits have a document.

        The change is as small as possible. Reading stops as soon as both splits have a document.
        `documents` has one or more. `key` is the run file's key, for messages. Raises `DataError`
        if there are fewer than two different documents.
        """
        least, most = RANGE, -1
        for text in documents:
            score, _ = self.scores(text.encode())
            least, most = min(least, score), max(most, score)
            if least < self.below <= most:
                return self
        if least == most:
            raise DataError(
                f"{key}: one document is not enough, since some documents must be held out; "
                "give more text"
            )
        return HoldoutSplit(self.seed, min(max(self.below, least + 1), most))


def prepare(
    data: DataSection,
    folder: Path,
    seed: int,
    progress: Progress | None = None,
    changed: Callable[[str], None] | None = None,
    replaced: Callable[[str], None] | None = None,
    finish: Callable[[Path, dict[str, Any]], None] = lambda _folder, _content: None,
) -> TokenFiles:
    """Make the token files of `data` in `folder`, or open them if they exist already.

    The folder is created atomically: it is complete or does not exist.

    Args:
        data: `[data]` of the run file.
        folder: folder of the token files.
        seed: seed that decides which documents are held out.
        progress: is called with the name of a step and its finished fraction, 0 to 1.
        changed: see `reuse`; passed by a run that resumes.
        replaced: if given, token files that do not fit `data` are made again, and the function is
            called with the reason. The old files are removed when the new ones are complete.
        finish: is called with the new folder and the content of its manifest, before both are
            described; may add columns.

    Raises:
        DataError: if text is missing, unreadable, empty or too short, or if `folder` holds other
            files or is a mount point.
    """
    check_place(folder)
    unused = set[str]() if data.has_conversations else set(CONVERSATION_KEYS)
    unused |= {key for key in ("sources", "columns") if not getattr(data, key)}
    options = without_unset(data.model_dump(mode="json", exclude=_READING | unused))
    options |= {"seed": seed}
    named = named_groups(data)
    stale = ""
    if (folder / MANIFEST).is_file():
        try:
            files = reuse(folder, named, options, changed)
            check_same_template(data, files.tokenizer_folder, changed)
        except DataError as error:
            if replaced is None:
                raise
            stale = str(error)
        else:
            check_lengths(files, data.rows)
            return files
    report = progress or _silent
    # If `folder` is a link, the files go to the disk of its target.
    place = Path(os.path.realpath(folder))
    groups = open_groups(named, report)
    try:
        with partial_folder(place) as partial, named_as(partial, folder):
            total = _total(groups, report)
            _check_disk(total, partial)
            text = _Text(groups, [_held(group, seed) for group in groups], total)
            content, spelled = _fill(partial, data, seed, text, report)
            finish(partial, content)
            write_croissant(partial, content)
            made_with = _made_with(options, text.sources) | {"special_text": dict(spelled)}
            made_with |= _rows(partial, content, data)
            write_manifest(partial, content, made_with)
            if publish(partial, place, replace=bool(stale)):
                if stale and replaced is not None:
                    replaced(stale)
                return TokenFiles.open(folder)
    except OSError as error:
        raise DataError(
            f"{folder}: token files cannot be written ({error.strerror}); name another folder or "
            "make room"
        ) from None
    return reuse(folder, named, options, changed)


def _silent(step: str, share: float) -> None:
    """Progress callback that does nothing."""


@dataclass(frozen=True)
class _Text:
    """The documents that a folder of token files is made of."""

    groups: list[Group]
    held: list[HoldoutSplit]
    """Which documents of each group are held out."""
    total: int | None
    """Bytes of all documents; None: unknown."""

    @property
    def sources(self) -> list[Source]:
        """The sources of all groups."""
        return [source for group in self.groups for source in group.sources]


def _held(group: Group, seed: int) -> HoldoutSplit:
    named = group.named
    if named.own_from is not None or not named.data.validation_fraction:
        return HoldoutSplit(seed, 0, named.own_from)
    below = int(named.data.validation_fraction * RANGE)
    documents = group_texts(named, group.sources)
    first = next(documents, None)
    if first is None:
        raise DataError(group.without_documents)
    return HoldoutSplit(seed, below).settled(chain([first], documents), named.key)


def _fill(
    partial: Path, data: DataSection, seed: int, text: _Text, report: Progress
) -> tuple[dict[str, Any], Mapping[str, int]]:
    """Write the tokenizer and the shards into `partial`.

    Returns the manifest's content, and the number of documents that contain special tokens as text,
    by token.
    """
    encoder, tokenizer = _make_tokenizer(partial / TOKENIZER, data, text, report)
    documents = DocumentEncoder(partial / TOKENIZER, data, encoder)
    splits, parts = _encode(partial, text, documents, report)
    documents.check_labels({split: packer.counted for split, packer in splits.items()})
    content: dict[str, Any] = {
        "dtype": splits["train"].dtype.name,
        "vocabulary_size": encoder.vocabulary_size,
        "end_of_text": _named(encoder, encoder.end_of_text),
        "tokenizer": tokenizer,
        "seed": seed,
        "splits": {split: splits[split].describe() for split in SPLITS},
        "sources": [source.describe() for source in text.sources],
    }
    if data.sources is None:
        content |= _rules(text.groups[0], text.held[0])
        if text.held[0].own_from is not None:
            content["validation_from"] = text.held[0].own_from
    else:
        content["mixture"] = [
            group.named.describe() | _rules(group, held)
            for group, held in zip(text.groups, text.held, strict=True)
        ]
        for split in SPLITS:
            content["splits"][split]["parts"] = parts[split]
    if documents.begin_of_text:
        content["begin_of_text"] = [_named(encoder, token) for token in documents.begin_of_text]
    if data.has_conversations:
        content["conversations"] = documents.describe()
    return content, documents.special_text


def _rules(group: Group, held: HoldoutSplit) -> dict[str, Any]:
    """Returns what the manifest says of the choice of a group's documents."""
    data = group.named.data
    return {
        "validation_fraction": data.validation_fraction if held.own_from is None else 0.0,
        "held_out_below": f"{held.below:016x}",
        "max_documents": data.max_documents,
    }


def _named(encoder: Encoder, token: int) -> dict[str, Any]:
    return {"token": encoder.tokenizer.id_to_token(token), "id": token}


def _make_tokenizer(
    folder: Path, data: DataSection, text: _Text, report: Progress
) -> tuple[Encoder, dict[str, Any]]:
    template = chosen_template(data)
    if data.tokenizer == "train":
        samples = Samples(text, report)
        marks = marks_of(template or "")
        encoder = train_tokenizer(samples.batches(), data.vocabulary_size, folder, marks)
        report("training the tokenizer", 1.0)
        entry: dict[str, Any] = {
            "kind": "trained",
            "sample": {"bytes": samples.bytes, "documents": samples.documents},
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


class Samples:
    """The text that a tokenizer is trained on: about `SAMPLE_BYTES` of the training documents.

    If local files hold more, documents are chosen by their second score, so that they are spread
    over the whole corpus. The size of hub datasets is unknown, so their first documents are taken,
    of each group the same number of bytes.
    """

    def __init__(self, text: _Text, report: Progress) -> None:
        self.bytes = self.documents = 0
        self._text, self._report = text, report
        share = min(1.0, SAMPLE_BYTES / text.total) if text.total else 1.0
        self._below = int(share * RANGE)

    def batches(self) -> Iterator[list[str]]:
        """Yield documents in batches of about `BATCH_CHARACTERS`."""
        trained = sum(1 for group in self._text.groups if group.named.trained)
        most = SAMPLE_BYTES
        for group, held in zip(self._text.groups, self._text.held, strict=True):
            if group.named.trained:
                if self._text.total is None:
                    most = self.bytes + SAMPLE_BYTES // trained
                yield from self._batches(group, held, most)

    def _batches(self, group: Group, held: HoldoutSplit, most: int) -> Iterator[list[str]]:
        expected = min(self._text.total or SAMPLE_BYTES, SAMPLE_BYTES)
        for batch in batches(group_texts(group.named, held.training(group.sources))):
            taken = []
            for text in batch:
                raw = text.encode()
                score, second = held.scores(raw)
                if score < held.below or second >= self._below:
                    continue
                taken.append(text.texts() if isinstance(text, Conversation) else text)
                self.bytes += len(raw)
                self.documents += 1
            self._report("training the tokenizer", min(0.99, self.bytes / expected))
            if taken:
                yield taken
            if self.bytes >= most:
                return


def _encode(
    partial: Path,
    text: _Text,
    documents: DocumentEncoder,
    report: Progress,
) -> tuple[dict[str, Packer], dict[str, list[dict[str, Any]]]]:
    """Write the shards, one group after another.

    Returns the packer of each split, and what each group has in it.
    """
    packers = {split: documents.packer(partial, split) for split in SPLITS}
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    done = 0
    try:
        for group, held in zip(text.groups, text.held, strict=True):
            before = {split: (each.tokens, each.documents) for split, each in packers.items()}
            for batch, places in placed_batches(group):
                encoded = documents.encode(batch)
                done += _pack(packers, batch, encoded, places, held, group.first)
                report("encoding", min(0.99, done / text.total) if text.total else 0.0)
            for split, packer in packers.items():
                tokens, number = before[split]
                if packer.documents > number or (split == "train" and group.named.trained):
                    found[split].append(
                        {
                            "name": group.named.name,
                            "tokens": packer.tokens - tokens,
                            "documents": packer.documents - number,
                        }
                    )
    finally:
        for packer in packers.values():
            packer.close()
    report("encoding", 1.0)
    return packers, found


def _pack(
    packers: Mapping[str, Packer],
    batch: list[str],
    encoded: list[Encoded | None],
    places: list[Place],
    held: HoldoutSplit,
    first: int,
) -> int:
    """Add a batch of a group's documents to their splits. Returns the bytes that were read."""
    parts: dict[str, list[Encoded]] = {split: [] for split in SPLITS}
    origins: dict[str, list[Place]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    done = 0
    for document, made, place in zip(batch, encoded, places, strict=True):
        raw = document.encode()
        done += len(raw)
        if made is None:
            continue
        split = "validation" if held.holds_out(place, raw) else "train"
        parts[split].append(made)
        origins[split].append((first + place[0], place[1]))
        sizes[split] += len(raw)
    for split in SPLITS:
        ids, counted, columns = zip(*parts[split], strict=True) if parts[split] else ((), (), ())
        said = counted if packers[split].flagged else None
        packers[split].add(ids, sizes[split], origins[split], said, columns)
    return done


def _total(groups: list[Group], report: Progress) -> int | None:
    """Returns the bytes that will be read of all groups, or None if a source's size is unknown."""
    totals = [_total_of(group, report) for group in groups]
    return None if None in totals else sum(total or 0 for total in totals)


def _total_of(group: Group, report: Progress) -> int | None:
    """Returns the bytes that will be read of a group, or None if a source's size is unknown.

    If there are more than `SAMPLE_BYTES` in the files, and `data.max_documents` or a filter takes a
    part of them, the text is read once more to count its bytes.
    """
    sources, data, own_from = group.sources, group.named.data, group.named.own_from
    total = 0
    for source in sources:
        if source.size is None:
            return None
        total += source.size
    whole = data.max_documents is None and data.filter in (None, {})
    if whole or total <= SAMPLE_BYTES:
        return total
    first = len(sources) if own_from is None else own_from
    total = sum(source.size or 0 for source in sources[first:])
    for number, text in enumerate(group_texts(group.named, sources[:first])):
        total += len(text.encode())
        if number % 1024 == 0:
            # Without a largest number, the share is not known before the end.
            report("counting documents", number / data.max_documents if data.max_documents else 0.0)
    report("counting documents", 1.0)
    return total


def _check_disk(total: int | None, folder: Path) -> None:
    """Raise `DataError` if the token files of `total` bytes of text cannot fit on the disk."""
    # A token has at least 2 bytes, and few tokenizers put more than 5 bytes of text in a token.
    least = total * 2 // 5 if total is not None else 0
    free = shutil.disk_usage(folder).free
    if free < least:
        raise DataError(
            f"{folder.parent}: token files need {size(least)} or more, but only {size(free)} are "
            "free; make room or set data.folder"
        )


def _rows(partial: Path, content: dict[str, Any], data: DataSection) -> dict[str, Any]:
    """Returns the key `rows` of `made_with`, empty for a stream of labels alone.

    Raises `DataError` as `check_lengths`.
    """
    manifest = {"format": format_of(content), "digest": digest_of(content), "content": content}
    files = TokenFiles(partial, manifest)
    # First, since a source without any tokens has no rows to describe.
    check_lengths(files, data.rows)
    described = describe_rows(files, data.rows)
    return {} if described is None else {"rows": described}


def _made_with(options: dict[str, Any], sources: list[Source]) -> dict[str, Any]:
    return {
        "options": options,
        # By source. These counts are not in the content, since they do not change the tokens.
        "left_out": [dict(source.left_out) for source in sources],
        "without_text": [source.without_text for source in sources],
        **_filtered(sources),
        "dilocox": __version__,
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
    }


def _filtered(sources: list[Source]) -> dict[str, Any]:
    """Returns the key `filtered` of `made_with`: records taken and read, by source.

    Nothing if no source has a filter.
    """
    filters = [source.filter for source in sources]
    if not any(filters):
        return {}
    return {"filtered": [each and [each.taken, each.read] for each in filters]}
