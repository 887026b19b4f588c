"""Judges the claim `witnesses`: enough witnesses have cosigned the whole log."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.errors import ConfigError, RecordError
from dilocox.record.log import cosigned
from dilocox.record.log.merkle import roots_at
from dilocox.record.log.signed_note import (
    LogCheckpoint,
    NoteKey,
    WitnessKey,
    cosigned_at,
    open_note,
)
from dilocox.record.log.transparency_log import leaves_of, read_text
from dilocox.record.verify.claims import NotRunError


@dataclass(frozen=True)
class Witnesses:
    """Whom the reader trusts to have seen the log."""

    keys: tuple[WitnessKey, ...]
    quorum: int
    """Number of witnesses that must have cosigned the whole log."""
    files: tuple[Path, ...] = ()
    """Cosigned checkpoints that the reader got elsewhere than beside the log."""

    @classmethod
    def parse(
        cls, keys: Sequence[str], quorum: int | None, files: Sequence[Path]
    ) -> Witnesses | None:
        """Return the witnesses of a command line; None if it names none.

        Args:
            keys: Public keys, as `NAME+HASH+KEY`.
            quorum: How many must have cosigned; None: all.
            files: Cosigned checkpoints.

        Raises:
            RecordError: A key is none.
            ConfigError: A key stands there twice, the quorum does not fit, or a file is missing.
        """
        if not keys:
            if quorum is not None or files:
                raise ConfigError("--quorum, --cosigned: name the witnesses, too, with --witness")
            return None
        for path in files:
            if not path.is_file():
                raise ConfigError(f"--cosigned {path}: not a file; name a cosigned checkpoint")
        parsed = tuple(WitnessKey.parse(each) for each in keys)
        # A cosignature does not sign its name, so one key under two names is one witness.
        if len({each.public for each in parsed}) != len(parsed):
            raise ConfigError("--witness: the same key twice; name each witness once")
        if quorum is not None and not 1 <= quorum <= len(parsed):
            raise ConfigError(f"--quorum {quorum}: give 1 to {len(parsed)}, the named witnesses")
        return cls(parsed, len(parsed) if quorum is None else quorum, tuple(files))


def judge_witnesses(asked: Witnesses, record: Path, key: NoteKey, entries: Sequence[str]) -> str:
    """Return a line on the witnesses that have cosigned the log.

    Args:
        asked: Whom the reader trusts.
        record: The record's folder.
        key: The log's key.
        entries: All entries of the log.

    Raises:
        RecordError: A checkpoint that the log's key has signed is not of this log (FAIL).
        NotRunError: Fewer witnesses than the quorum have cosigned all of the log, or a file that
            the reader has given is of another log.
    """
    heads: list[tuple[Path, LogCheckpoint]] = []
    newest: dict[WitnessKey, tuple[int, int]] = {}
    for path, note, given in _notes(asked, record):
        _check_given(path, note, key, given)
        try:
            head = LogCheckpoint.parse(open_note(note, key))
            if head.origin != key.name:
                raise RecordError(f"it is of log {head.origin!r}")
            for each in asked.keys:
                time = cosigned_at(note, each)
                if time is not None:
                    newest[each] = max(newest.get(each, (-1, 0)), (head.size, time))
        except RecordError as error:
            raise RecordError(
                f"{path.name}: no cosigned checkpoint of this log ({error})"
            ) from None
        heads.append((path, head))
    _check_prefixes(heads, entries)
    return _counted(asked, newest, len(entries))


def _notes(asked: Witnesses, record: Path) -> Iterator[tuple[Path, str, bool]]:
    """Iterate over files, their notes, and whether the reader has given them."""
    for path, note in cosigned.read_all(record):
        yield path, note, False
    for path in asked.files:
        yield path, read_text(path), True


def _check_given(path: Path, note: str, key: NoteKey, given: bool) -> None:
    """Raise `NotRunError` if a file that the reader has given says nothing about this log."""
    try:
        open_note(note, key)
    except RecordError as error:
        if given:
            raise NotRunError(
                f"--cosigned {path.name}: says nothing about this log ({error}); name a file that "
                "a witness has cosigned of it"
            ) from None


def _check_prefixes(heads: Sequence[tuple[Path, LogCheckpoint]], entries: Sequence[str]) -> None:
    """Raise `RecordError` if a signed head is not a prefix of the log."""
    roots = roots_at(leaves_of(entries), {head.size for _, head in heads})
    for path, head in heads:
        if head.size > len(entries):
            raise RecordError(
                f"{path.name}: a checkpoint of {head.size} statements was cosigned, this log has "
                f"{len(entries)}: it was cut back"
            )
        if roots[head.size] != head.root:
            raise RecordError(
                f"{path.name}: a checkpoint of {head.size} statements was cosigned that is not a "
                "prefix of this log: the same key has signed two different logs (that file and "
                "this log's checkpoint are the evidence)"
            )


def _counted(asked: Witnesses, newest: dict[WitnessKey, tuple[int, int]], size: int) -> str:
    lacking = [each.name for each in asked.keys if each not in newest]
    if len(newest) < asked.quorum:
        raise NotRunError(
            f"{len(newest)} of {len(asked.keys)} witnesses have cosigned, {asked.quorum} are "
            f"needed; no cosignature here of {', '.join(lacking)}"
        )
    sizes = sorted((each for each, _ in newest.values()), reverse=True)
    covered = sizes[asked.quorum - 1]
    if covered < size:
        raise NotRunError(
            f"{asked.quorum} witnesses have cosigned the first {covered} of {size} statements: ask "
            "them again (dilocox witness ask)"
        )
    whole = [time for each, time in newest.values() if each == size]
    names = f"{len(whole)} of {len(asked.keys)} witnesses ({asked.quorum} needed)"
    told = f"{names} have cosigned all {size} statements, the last at {_when(max(whole))}"
    if 2 * asked.quorum <= len(asked.keys):  # two quorums need not have a witness in common
        told += "; with so small a quorum, others may have been shown another log"
    return told


def _when(time: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "a time that no calendar has"
