"""The folder of one witness: its key, the logs that it trusts, and what it has cosigned.

Files: `key` (mode 600, the form of C2SP signed notes: `PRIVATE+KEY+NAME+HASH+KEY`), `logs` (one
public key of a log per line), `cosigned/` (the newest cosigned checkpoint of each log) and
`evidence/` (checkpoints that contradict it). A cosigned checkpoint is on the disk before its
cosignature leaves, and one process at a time has the folder. So a witness that crashes never signs
two histories.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.coordinator.identity import write_private
from dilocox.errors import ConfigError, RecordError
from dilocox.record.log.signed_note import LogCheckpoint, NoteKey, WitnessKey, open_note
from dilocox.record.writer.one_writer import held
from dilocox.utils.storage import replace_file, sync_folder

KEY, LOGS, COSIGNED, EVIDENCE, LOCK = "key", "logs", "cosigned", "evidence", "witness.lock"
LOGS_LOCK = "logs.lock"
TRUST_SECONDS = 10.0
"""Seconds for which `trust` waits for another process that adds a log."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9./_-]{0,99}")
"""Names of witnesses: those of web addresses without a scheme, such as `witness.example/w1`."""


class WitnessFolder:
    """Key and memory of a witness. Use `opened`, which keeps other processes out."""

    def __init__(self, folder: Path) -> None:
        """Read the key. Raises `RecordError` if the folder is none of a witness."""
        self.folder = folder
        self.name, self.private = _read_key(folder / KEY)
        self.key = WitnessKey(self.name, self.private.public_key().public_bytes_raw())

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path) -> Iterator[WitnessFolder]:
        """Yield the folder, which no other process may use meanwhile.

        Raises `RecordError` if another process has it, or if it is none of a witness.
        """
        found = cls(folder)
        with contextlib.ExitStack() as stack:
            if not _taken(stack, folder, LOCK, 0.0):
                raise RecordError(
                    f"{folder}: another process is this witness; stop it first, since two "
                    "could sign two histories"
                )
            yield found

    def trusted(self, origin: str) -> NoteKey | None:
        """Return the key of the log named `origin`; None if the witness does not know it.

        The file is read anew, so a log can be added while the witness runs. Raises `RecordError`.
        """
        return next((key for key in self.logs() if key.name == origin), None)

    def logs(self) -> list[NoteKey]:
        """Return the keys of all logs that the witness trusts. Raises `RecordError`."""
        path = self.folder / LOGS
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}: cannot be read ({error})") from None
        return [NoteKey.parse(line) for line in lines if line.strip()]

    def trust(self, key: NoteKey) -> bool:
        """Add a log; return False if it is there already.

        Raises `RecordError` if another key has the same name.
        """
        with contextlib.ExitStack() as stack:
            if not _taken(stack, self.folder, LOGS_LOCK, TRUST_SECONDS):
                raise RecordError(f"{self.folder}: another process adds logs; try again")
            known = self.trusted(key.name)
            if known is not None and known != key:
                raise RecordError(f"log {key.name}: the witness knows it with another key, {known}")
            if known is None:
                logs = "".join(f"{each}\n" for each in [*self.logs(), key])
                try:
                    self._write(self.folder / LOGS, logs)
                except OSError as error:
                    raise RecordError(
                        f"{self.folder}: cannot be written ({error.strerror})"
                    ) from None
        return known is None

    def newest(self, key: NoteKey) -> tuple[LogCheckpoint, str] | None:
        """Return the newest checkpoint that was cosigned of a log, and its note; None if none was.

        Raises `RecordError` if the file is damaged: the witness then cannot know what it signed.
        """
        path = self.path(key.name)
        try:
            note = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}: cannot be read ({error})") from None
        return LogCheckpoint.parse(open_note(note, key)), note

    def keep(self, origin: str, note: str) -> None:
        """Make `note` the newest cosigned checkpoint, so that it survives a power cut."""
        self._write(self.path(origin), note)

    def accuse(self, origin: str, size: int, own: str, other: str) -> Path:
        """Keep two notes of a log that contradict each other; return their folder.

        Of one size the first two notes are kept. Raises `OSError` if they cannot be written; the
        next call writes what is missing.
        """
        folder = self.folder / EVIDENCE / f"{_digest(origin)}-{size}"
        # The other note is written last: if it is there, the evidence is whole.
        if not (folder / "other").exists():
            self._write(folder / "seen", own)
            self._write(folder / "other", other)
            sync_folder(folder.parent)
        return folder

    def path(self, origin: str) -> Path:
        """File of the newest cosigned checkpoint of a log."""
        return self.folder / COSIGNED / f"{_digest(origin)}.note"

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
        sync_folder(path.parent)


def create(folder: Path, name: str) -> WitnessFolder:
    """Make the folder of a new witness.

    Raises:
        ConfigError: The name is not one of a witness.
        RecordError: The folder has a key already, or cannot be written.
    """
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"--name {name!r}: give 1 to 100 letters, digits and ./_-, such as witness.example/w1"
        )
    if (folder / KEY).exists():
        raise RecordError(f"{folder}: has a key; a witness keeps its key, so name a new folder")
    private = Ed25519PrivateKey.generate()
    public = WitnessKey(name, private.public_key().public_bytes_raw())
    secret = base64.b64encode(WitnessKey.KIND + private.private_bytes_raw()).decode()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        line = f"PRIVATE+KEY+{name}+{public.hash.hex()}+{secret}\n"
        write_private(folder / KEY, line.encode())
    except OSError as error:
        raise RecordError(f"{folder}: cannot be written ({error.strerror})") from None
    return WitnessFolder(folder)


def _read_key(path: Path) -> tuple[str, Ed25519PrivateKey]:
    try:
        match = re.fullmatch(
            r"PRIVATE\+KEY\+([^\s+]+)\+([0-9a-f]{8})\+(\S+)", path.read_text("utf-8").strip()
        )
        seed = base64.b64decode(match[3], validate=True) if match else b""
        if match is not None and seed[:1] == WitnessKey.KIND and len(seed) == 33:
            return match[1], Ed25519PrivateKey.from_private_bytes(seed[1:])
    except FileNotFoundError:
        raise RecordError(
            f"{path.parent}: not a witness's folder; make one with: dilocox witness create FOLDER "
            "--name NAME"
        ) from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None
    raise RecordError(f"{path}: not the key of a witness; put it back from a copy")


def _taken(stack: contextlib.ExitStack, folder: Path, name: str, patience: float) -> bool:
    """Take a lock of the folder until `stack` ends. Raises `RecordError` if there can be none."""
    try:
        return stack.enter_context(held(folder, patience, name))
    except OSError as error:
        raise RecordError(f"{folder}: cannot be used ({error.strerror})") from None


def _digest(origin: str) -> str:
    return hashlib.sha256(origin.encode()).hexdigest()[:32]
