"""Finds the token ranges that a model was trained on, from the record, or else the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.config.run_config import load_written
from dilocox.data import SequenceSpace, TokenFiles
from dilocox.data.coverage import Seen, seen_documents
from dilocox.data.folder import folder_of_run
from dilocox.errors import DataError, RecordError
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import ENTRIES, check_log, open_log
from dilocox.record.verify.run_history import read_history

SHARED = "shared"
"""Name of the space of token ranges that all sites share; other spaces belong to one site."""


@dataclass(frozen=True)
class Consumed:
    """One token range that one site's contribution to one round was computed from."""

    site: str
    round: int
    space: str
    start: int
    count: int


@dataclass(frozen=True)
class Answer:
    """The data that a model had seen."""

    ranges: tuple[Consumed, ...]
    documents: tuple[Seen, ...]
    """Seen documents of the shared token files."""
    total: int
    """Number of documents in the training split of the shared token files."""
    sequence_length: int
    signed: bool
    """True: from the record, with all signatures checked. False: from the unsigned ledger."""


def seen_by(
    folder: Path, *, rounds: int | None, tick: int | None, data: Path | None = None
) -> Answer:
    """Return the data that the model of the run in `folder` had seen at some point of the run.

    Args:
        folder: The run's folder.
        rounds: Number of rounds before that point; None: `tick` gives the point.
        tick: Number of slots before that point. None, with `rounds` None: the end of the run.
        data: Folder of the token files; None: the folder that the run file names.

    Raises:
        DilocoxError: The run, its record or its token files cannot be read, or no range is known.
    """
    config = load_written(folder / "run.toml")
    if config.data.own:
        raise DataError(
            f"{folder}: the sites' own programs brought the data (data.own), so no text is known"
        )
    signed = (folder / "record" / ENTRIES).is_file()
    if signed:
        found = from_steps(_steps(folder), rounds=rounds, tick=tick)
    elif tick is not None:
        raise RecordError(
            f"{folder}: has no record, its ledger knows whole rounds only; give --round"
        )
    else:
        found = from_ledger(_ledger(folder), rounds)
    if not found:
        raise DataError(f"{folder}: no token range is known that the model had seen by then")
    files = TokenFiles.open(data or folder_of_run(folder))
    space = SequenceSpace.of(config.data, files, seed=config.run.seed)
    shared = ((each.start, each.count) for each in found if each.space == SHARED)
    return Answer(
        tuple(found),
        tuple(seen_documents(files, space, shared)),
        files.document_count("train"),
        space.sequence_length,
        signed,
    )


def command(
    folder: Path, rounds: int | None, tick: int | None, data: Path | None, as_json_text: bool
) -> str:
    """Return the text that `dilocox data show RUN` prints. Raises `DilocoxError`."""
    for name, value in (("--round", rounds), ("--checkpoint", tick)):
        if value is not None and value < 1:
            raise DataError(f"{name} {value}: give 1 or more")
    answer = seen_by(folder, rounds=rounds, tick=tick, data=data)
    return json.dumps(as_json(answer)) if as_json_text else as_text(answer)


def from_steps(
    steps: Iterable[Mapping[str, Any]], *, rounds: int | None = None, tick: int | None = None
) -> list[Consumed]:
    """Return the token ranges of outer-step statements, each once. Pure.

    With `tick`, a round in progress counts by its share of finished slots.
    """
    found: dict[Consumed, None] = {}
    for said in steps:
        if said["kind"] == "flush" or (rounds is not None and said["round"] >= rounds):
            continue
        slots = int(said["slots"])
        done = slots if tick is None else min(slots, tick - int(said["first_tick"]))
        if done <= 0:
            continue
        for site, ranges in said["ranges"].items():
            left = sum(count for _, count in ranges) * done // slots
            for start, count in ranges:
                taken = min(count, left)
                left -= taken
                if taken:
                    place = (site, int(said["round"]), str(said["spaces"][site]))
                    found[Consumed(*place, int(start), int(taken))] = None
    return list(found)


def from_ledger(ledger: Mapping[str, Any], rounds: int | None) -> list[Consumed]:
    """Return the token ranges that a ledger marks as committed. Pure."""
    return [
        Consumed(each["site"], each["round"], each["space"], each["start"], each["count"])
        for each in ledger["entries"]
        if each["state"] == "committed" and (rounds is None or each["round"] < rounds)
    ]


def _steps(folder: Path) -> list[Mapping[str, Any]]:
    """Read the predicates of the outer steps that count, with all signatures checked."""
    content = open_log(folder / "record")
    key = NoteKey.parse(content.public)
    check_log(content, key)
    steps = [step.said for step in read_history(content.entries, key).steps.values()]
    if not all("ranges" in each for each in steps):
        raise RecordError(f"{folder}: its record is of a dilocox that did not note token ranges")
    return steps


def _ledger(folder: Path) -> Mapping[str, Any]:
    path = folder / "ledger.json"
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path}: not there, and the run has no record; a run writes it at its end"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    return found


LISTED = 40
"""Maximum number of files that the text lists."""


def as_text(answer: Answer) -> str:
    """Render the answer as lines of text."""
    by_site: dict[str, int] = {}
    for each in answer.ranges:
        own = "" if each.space == SHARED else ", of its own text, which is not looked at here"
        by_site[each.site + own] = by_site.get(each.site + own, 0) + each.count
    count = sum(by_site.values())
    rounds = 1 + max(each.round for each in answer.ranges)
    source = "the signed record" if answer.signed else "ledger.json, which is not signed"
    lines = [
        f"seen         {count:,} sequences of {answer.sequence_length} tokens "
        f"({count * answer.sequence_length:,} tokens) in {rounds} rounds, as {source} says"
    ]
    for site, sequences in by_site.items():
        name, _, own = site.partition(",")
        lines.append(f"  {name:<10} {sequences:,} sequences{',' + own if own else ''}")
    whole = sum(1 for each in answer.documents if each.seen == each.tokens)
    lines.append(
        f"documents    {len(answer.documents):,} of {answer.total:,}: {whole:,} whole, "
        f"{len(answer.documents) - whole:,} in part"
    )
    files: dict[tuple[int, str], list[Seen]] = {}
    for document in answer.documents:
        files.setdefault((document.source, document.file), []).append(document)
    for (number, name), documents in list(files.items())[:LISTED]:
        share = sum(d.seen for d in documents) / sum(d.tokens for d in documents)
        what = f"{len(documents)} documents" if len(documents) > 1 else "1 document"
        lines.append(f"  {name or f'source {number}'}: {what}, {share:.0%} of their tokens")
    if len(files) > LISTED:
        lines.append(f"  … and {len(files) - LISTED:,} more files; --json has every document")
    return "\n".join(lines)


def as_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as JSON values, with every document."""
    return {
        "signed": answer.signed,
        "sequence_length": answer.sequence_length,
        "ranges": [vars(each) for each in answer.ranges],
        "documents": [vars(each) for each in answer.documents],
    }
