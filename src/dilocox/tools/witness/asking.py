"""Asks witnesses to cosign the newest checkpoint of a run's log, and keeps what they sign.

Every call has a time limit. A witness may be dead, slow or dishonest: its answer counts only if its
cosignature is under this log's own checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from dilocox.errors import RecordError
from dilocox.record.log import cosigned
from dilocox.record.log.merkle import consistency_proof
from dilocox.record.log.signed_note import (
    LogCheckpoint,
    NoteKey,
    WitnessKey,
    cosigned_at,
    open_note,
)
from dilocox.record.log.transparency_log import (
    CHECKPOINT,
    PUBLIC,
    LogContent,
    check_log,
    leaves_of,
    read_covered,
    read_text,
)
from dilocox.tools.witness.requests import MOST_BYTES, request_body
from dilocox.utils.http_proxy import proxy_of
from dilocox.utils.plain_text import plain

SECONDS = 20.0
"""Time limit of one witness, for all of its calls."""


@dataclass(frozen=True)
class WitnessAddress:
    """A witness, as a log asks it."""

    key: WitnessKey
    url: str
    """Prefix of the address of `add-checkpoint`."""


@dataclass(frozen=True)
class Answer:
    """What became of asking one witness."""

    witness: WitnessAddress
    size: int
    """Statements of the checkpoint."""
    trouble: str = ""
    """Why it is not cosigned; empty if it is."""


def ask(
    run: Path,
    witnesses: Sequence[WitnessAddress],
    seconds: float = SECONDS,
    note: str | None = None,
) -> list[Answer]:
    """Have a checkpoint of the log of `run` cosigned, by all witnesses at once.

    Cosignatures are kept below `record/cosigned`.

    Args:
        run: The run's folder.
        witnesses: The witnesses. A witness that has cosigned a later checkpoint already, as the
            folder shows, is not asked; its answer names that size.
        seconds: Time limit of one witness.
        note: The signed checkpoint; None: the newest one of the folder.

    Raises:
        RecordError: The run has no log that can be read, `note` is no checkpoint of it, or a
            cosignature cannot be written.
    """
    record = run / "record"
    key = NoteKey.parse(read_text(record / PUBLIC))
    try:
        content = read_covered(record, key, note)
        checkpoint = check_log(content, key)
    except RecordError as error:
        if note is None:
            raise
        raise RecordError(f"{run}: the given checkpoint is not one of this log: {error}") from None
    grown = checkpoint.size
    if note is not None:
        grown = LogCheckpoint.parse(open_note(read_text(record / CHECKPOINT), key)).size
    # Of a checkpoint other cosignatures may be there already: only the log's own is sent.
    log = _Log(record, key, content, checkpoint, grown)

    async def all_at_once() -> list[Answer]:
        return list(await asyncio.gather(*(_ask(log, each, seconds) for each in witnesses)))

    return asyncio.run(all_at_once())


@dataclass(frozen=True)
class _Log:
    record: Path
    key: NoteKey
    content: LogContent
    checkpoint: LogCheckpoint
    grown: int
    """Statements of the log's newest checkpoint."""

    def body(self, old: int) -> bytes:
        proof = []
        if 0 < old <= self.checkpoint.size:
            proof = consistency_proof(list(leaves_of(self.content.entries)), old)
        return request_body(old, proof, self.content.note)

    def known(self, witness: WitnessKey) -> int:
        """Return the size that the witness has cosigned last, as far as known here."""
        path = cosigned.path_of(self.record, witness)
        try:
            note = read_text(path)
            if cosigned_at(note, witness) is not None:
                return LogCheckpoint.parse(open_note(note, self.key)).size
        except RecordError:
            pass  # missing or damaged: the witness says the size itself
        return 0


async def _ask(log: _Log, witness: WitnessAddress, seconds: float) -> Answer:
    known = log.known(witness.key)
    if log.checkpoint.size < known <= log.grown:
        return Answer(witness, known)
    try:
        by_proxy = proxy_of(witness.url) is not None
        async with asyncio.timeout(seconds), aiohttp.ClientSession(trust_env=by_proxy) as session:
            line = await _cosignature(session, log, witness)
    except TimeoutError:
        return Answer(witness, log.checkpoint.size, f"no answer within {seconds:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Answer(witness, log.checkpoint.size, plain(str(error) or type(error).__name__)[:300])
    except RecordError as error:
        return Answer(witness, log.checkpoint.size, str(error))
    note = log.content.note + line
    try:
        cosigned.keep(log.record, log.key, witness.key, note)
    except RecordError as error:
        return Answer(witness, log.checkpoint.size, f"its answer is no cosignature ({error})")
    except OSError as error:
        raise RecordError(
            f"{log.record / cosigned.COSIGNED}: cannot be written ({error.strerror})"
        ) from None
    return Answer(witness, log.checkpoint.size)


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    """Return an answer's first `MOST_BYTES` bytes, however they arrive."""
    found = bytearray()
    while len(found) < MOST_BYTES and (chunk := await reply.content.read(MOST_BYTES - len(found))):
        found += chunk
    return bytes(found)


async def _cosignature(session: aiohttp.ClientSession, log: _Log, witness: WitnessAddress) -> str:
    """Return the signature lines that the witness answers. Raises `RecordError` if it refuses."""
    old = kept = log.known(witness.key)
    for again in (True, False):
        url = f"{witness.url.rstrip('/')}/add-checkpoint"
        body = await asyncio.to_thread(log.body, old)
        async with session.post(url, data=body, allow_redirects=False) as reply:
            text = (await _body(reply)).decode(errors="replace")
            if reply.status == 200:
                return text if text.endswith("\n") else text + "\n"
            said = plain(text.strip())[:300]
            if reply.status == 409 and said.isascii() and said.isdigit():
                size = int(said[:19])
                if log.checkpoint.size < size <= log.grown:
                    raise RecordError(
                        f"it says that it has cosigned {size} statements already, more than this "
                        f"checkpoint has: {log.checkpoint.size}"
                    )
                if size > log.checkpoint.size:
                    raise RecordError(
                        f"it says that it has cosigned {size} statements, and this log has "
                        f"{log.checkpoint.size}: was the log cut back?"
                    )
                if size < kept:
                    raise RecordError(
                        f"it has cosigned {kept} statements, and says now that it knows {size}: it "
                        "has forgotten what it signed, so it is no witness any more; its operator "
                        "makes a new one with: dilocox witness create"
                    )
                if size == old == log.checkpoint.size:
                    raise RecordError(
                        f"it says that it has cosigned another log of {size} statements, signed by "
                        "the same key"
                    )
                if again:
                    old = size
                    continue
                raise RecordError(f"it says that it has cosigned {size} statements, and refuses")
            if reply.status == 404:
                raise RecordError(
                    f"it does not know this log; its operator adds it with: dilocox witness trust "
                    f"FOLDER {log.key}"
                )
            raise RecordError(f"it refuses ({reply.status}: {said})")
    raise AssertionError("the last call returns or raises")
