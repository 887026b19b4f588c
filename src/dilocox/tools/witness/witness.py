"""Decides whether a witness cosigns a checkpoint (c2sp.org/tlog-witness, `add-checkpoint`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from dilocox.errors import RecordError
from dilocox.record.log.merkle import EMPTY, is_consistent
from dilocox.record.log.signed_note import (
    LogCheckpoint,
    NoteKey,
    cosign,
    open_note,
    signed_only,
    split_note,
)
from dilocox.tools.witness.folder import WitnessFolder

MOST_PROOF = 63
"""Most hashes of a consistency proof."""
SIZE_TYPE = "text/x.tlog.size"
"""Content type of the answer that tells the size of the newest cosigned checkpoint."""


class RefusedError(RecordError):
    """A witness does not cosign."""

    def __init__(
        self, status: int, reason: str, size: int | None = None, *, forked: bool = False,
        signed: bool = False,
    ) -> None:  # fmt: skip
        """Create the refusal.

        Args:
            status: Of HTTP.
            reason: One line.
            size: Statements of the newest cosigned checkpoint, for status 409.
            forked: Whether the log has signed two histories.
            signed: Whether a trusted log has signed the checkpoint.
        """
        super().__init__(reason)
        self.status, self.size, self.forked, self.signed = status, size, forked, signed


class Witness:
    """Cosigns checkpoints that continue what it has cosigned of the same log before."""

    def __init__(self, folder: WitnessFolder, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time in seconds."""
        self.folder = folder
        self._clock = clock
        self._lock = threading.Lock()

    def add(self, old: int, proof: Sequence[bytes], note: str) -> str:
        """Return the witness's signature line under a checkpoint.

        Args:
            old: Size of the newest checkpoint that this witness has cosigned of the log; 0: none.
            proof: Consistency proof from that size to the checkpoint's.
            note: The checkpoint, signed by the log.

        Raises:
            RefusedError: The witness does not cosign; `status` is that of the protocol.
            OSError: The checkpoint cannot be kept. Then there is no cosignature.
        """
        key, checkpoint, text = self._opened(note)
        if old > checkpoint.size:
            raise RefusedError(400, "the old size is above the checkpoint's")
        # Check and write are one step: else a later request could be overtaken and rolled back.
        with self._lock:
            newest = self.folder.newest(key)
            self._check(newest, old, proof, checkpoint, note)
            line = cosign(text, self.folder.name, self.folder.private, int(self._clock()))
            if newest is None or newest[0].size != checkpoint.size:
                # Signatures of others are not checked, so they are not kept.
                self.folder.keep(key.name, signed_only(note, key) + line)
        return line

    def _opened(self, note: str) -> tuple[NoteKey, LogCheckpoint, str]:
        try:
            text, _ = split_note(note)
            checkpoint = LogCheckpoint.parse(text)
        except RecordError as error:
            raise RefusedError(400, str(error)) from None
        key = self.folder.trusted(checkpoint.origin)
        if key is None:
            raise RefusedError(
                404, f"log {checkpoint.origin[:100]} is not one that is trusted here"
            )
        try:
            open_note(note, key)
        except RecordError as error:
            raise RefusedError(403, str(error)) from None
        return key, checkpoint, text

    def _check(
        self,
        newest: tuple[LogCheckpoint, str] | None,
        old: int,
        proof: Sequence[bytes],
        checkpoint: LogCheckpoint,
        note: str,
    ) -> None:
        """Raise `RefusedError` if the checkpoint does not continue the newest one."""
        size = newest[0].size if newest is not None else 0
        if old != size:
            raise RefusedError(409, f"{size} statements were cosigned, not {old}", size)
        if newest is None or size == 0:
            if proof or (checkpoint.size == 0 and checkpoint.root != EMPTY):
                raise RefusedError(422, "from size 0 the proof is empty, and so is the tree")
            return
        if size == checkpoint.size and newest[0].root != checkpoint.root:
            # Both are signed by the log: nothing else is needed to show that it has forked.
            where = self.folder.accuse(checkpoint.origin, size, newest[1], note)
            raise RefusedError(
                409,
                f"log {checkpoint.origin} has signed two histories of {size} statements; both "
                f"checkpoints are in {where}",
                size,
                forked=True,
            )
        if not is_consistent(size, newest[0].root, checkpoint.size, checkpoint.root, proof):
            # No evidence: anybody can send the log's own checkpoint with a wrong proof.
            raise RefusedError(
                422,
                f"the proof does not show that these {checkpoint.size} statements continue the "
                f"{size} that were cosigned",
                signed=True,
            )
