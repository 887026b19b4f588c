"""The record of a run by a dilocox whose sites signed no acceptance, with its log's private key."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.record.log.transparency_log import CHECKPOINT, ENTRIES, LogWriter, read_log

ARCHIVE = Path(__file__).parent / "fixtures" / "older_record.tar.xz"
"""`old/`: run.toml, record, model and the log's key of 2 rounds of 2 sites; `data/`: its token
files."""


def unpacked(folder: Path) -> Path:
    """The run's folder below `folder`; its token files are in `folder/data`."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "old"


def log_key(run: Path) -> Ed25519PrivateKey:
    """The private key of a run's log."""
    seed = (run / "coordinator" / "record-key").read_text()
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))


def resign(run: Path, change: Callable[[list[str]], object]) -> None:
    """Change statements and sign the log anew, as a dishonest coordinator could."""
    content = read_log(run / "record")
    entries = list(content.entries)
    change(entries)
    for name in (ENTRIES, CHECKPOINT):
        (run / "record" / name).unlink()
    log = LogWriter(run / "record", content.public.split("+")[0], log_key(run))
    for entry in entries:
        log.append(entry)
    log.close()
