"""Logs that fork, and witnesses for them: what the tests of witnesses share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.record.log.merkle import consistency_proof, leaf_hash, root_of
from dilocox.record.log.signed_note import LogCheckpoint, NoteKey, WitnessKey, sign_note
from dilocox.record.log.transparency_log import LogWriter
from dilocox.tools.witness.asking import WitnessAddress
from dilocox.tools.witness.folder import WitnessFolder, create

ORIGIN = "dilocox/test/log"
LOG_KEY = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
LOG = NoteKey(ORIGIN, LOG_KEY.public_key().public_bytes_raw())


def entries(size: int, fork: int | None = None) -> list[str]:
    """Statements of a log; from `fork` on they are others."""
    return [f"{n}{'*' if fork is not None and n >= fork else ''}" for n in range(size)]


def hashes(texts: Sequence[str]) -> list[bytes]:
    """Leaf hashes of statements."""
    return [leaf_hash(each.encode()) for each in texts]


def signed(texts: Sequence[str], origin: str = ORIGIN) -> str:
    """The checkpoint of these statements, signed by the log's key."""
    checkpoint = LogCheckpoint(origin, len(texts), root_of(hashes(texts)))
    return sign_note(checkpoint.text, origin, LOG_KEY)


def proof(texts: Sequence[str], old: int) -> list[bytes]:
    """Consistency proof from `old` statements on; none from nothing."""
    return consistency_proof(hashes(texts), old) if 0 < old <= len(texts) else []


def write_log(run: Path, texts: Sequence[str]) -> None:
    """A run's folder with a log of these statements; a longer log goes on."""
    log = LogWriter(run / "record", ORIGIN, LOG_KEY)
    for each in texts[log.size :]:
        log.append(each)
    log.close()


def witness_folder(path: Path, name: str = "witness.example/w1") -> WitnessFolder:
    """A new witness that trusts the log."""
    folder = create(path, name)
    folder.trust(LOG)
    return folder


@contextlib.contextmanager
def serving(path: Path) -> Iterator[tuple[subprocess.Popen[str], WitnessAddress]]:
    """`dilocox witness serve`, and where it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dilocox", "witness", "serve", str(path), "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[::2] == ["witness", "at"], words
        yield process, WitnessAddress(WitnessKey.parse(words[1]), words[3])
    finally:
        process.kill()
        process.wait()
