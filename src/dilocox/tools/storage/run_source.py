"""The folder of a run that is published: its log, its key, its other files, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.data.croissant import CROISSANT, render_croissant
from dilocox.data.manifest import read_manifest
from dilocox.errors import ConfigError, DilocoxError, RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import run_of
from dilocox.record.log.audit_verdicts import FOLDER as AUDITS
from dilocox.record.log.blob_store import Stores
from dilocox.record.log.cosigned import COSIGNED
from dilocox.record.log.run_end import has_summary
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.state_statements import State
from dilocox.record.log.transparency_log import PUBLIC, LogContent, read_covered, read_text
from dilocox.record.writer.notary import KEY_FILE
from dilocox.record.writer.one_writer import held
from dilocox.tools.release.publish import COURSE, Sources, agreed, find, secrets_of
from dilocox.training.run_model import check_plain_folder
from dilocox.utils.storage import unsafe_reason


@dataclass
class RunSource:
    """A run in the coordinator's folder, and in folders and stores of its sites."""

    folder: Path
    sites: tuple[Path, ...] = ()
    """Run folders of sites, or copies of them."""
    stores: tuple[str, ...] = ()
    """Further stores with payloads."""
    found: Sources = field(init=False)
    log: NoteKey = field(init=False)
    """The log's public key."""
    private: Ed25519PrivateKey = field(init=False)
    """The log's private key."""
    secrets: list[bytes] = field(init=False)
    """Contents that must not be published."""
    coordinated: bool = field(init=False, default=True)
    """False if `has_ended` found no coordinator on the folder the last time."""

    def __post_init__(self) -> None:
        """Find the parts of the run, and read the log's key.

        Raises `ConfigError` or `RecordError` if the folder is not that of a run's coordinator.
        """
        self.found = find(self.folder, self.sites, self.stores)
        if self.found.config is None:
            raise ConfigError(
                f"{self.folder}: is not the folder of a run's coordinator; missing: "
                f"{'; '.join(self.found.missing)}"
            )
        self.log = NoteKey.parse(read_text(self.folder / "record" / PUBLIC).strip())
        self.private = self._private()
        self.secrets = secrets_of(self.found)

    def look_again(self) -> None:
        """Find the parts of the run again; a run in progress gets new ones.

        A run file that cannot be read now, because a coordinator writes it, leaves the known one.
        """
        known, self.found = self.found, find(self.folder, self.sites, self.stores)
        if self.found.config is None and known.config is not None:
            self.found.config = known.config

    def _private(self) -> Ed25519PrivateKey:
        path = self.folder / "coordinator" / KEY_FILE
        try:
            seed = bytes.fromhex(path.read_text(encoding="ascii").strip())
            key = Ed25519PrivateKey.from_private_bytes(seed)
        except (OSError, ValueError) as error:
            raise RecordError(
                f"{path}: the log's key cannot be read ({error}); publish where the coordinator "
                "ran, because its key signs what is published"
            ) from None
        if key.public_key().public_bytes_raw() != self.log.public:
            raise RecordError(f"{path}: is not the key of {self.folder / 'record'}")
        return key

    def read(self) -> LogContent:
        """Return the part of the log that its newest checkpoint covers. Raises `RecordError`."""
        return read_covered(self.folder / "record", self.log)

    def run(self) -> str:
        """Return the run's id. Raises `RecordError` if the log is empty."""
        for entry in self.read().entries[:1]:
            return run_of(entry, s.opened(entry)[0].predicate)
        raise RecordError(f"{self.folder}: its log is empty; publish it once the run has begun")

    def open_stores(self) -> Stores:
        """Return the stores that hold the run's objects, as they are now."""
        from dilocox.record.log.blob_store import Store

        return Stores([Store(each) for each in self.found.stores])

    def has_ended(self, statements: set[tuple[str, int]]) -> bool:
        """Return True if nothing more will be written.

        `statements`: (kind, stage) of all states in the log. No coordinator runs on the folder, and
        the run has a summary, or all its final states are signed.
        """
        with held(self.folder / "coordinator") as free:
            self.coordinated = not free
        if self.coordinated:
            return False
        return has_summary(self.folder) or self.is_complete(statements)

    def is_complete(self, statements: set[tuple[str, int]]) -> bool:
        """Return True if the final states of all stages are in the log."""
        assert self.found.config is not None
        stages = self.found.config.site.stages
        return all(("final", stage) in statements for stage in range(stages))

    def files(self, ended: bool, complete: bool) -> dict[str, Path | bytes]:
        """Return files of bundles that are neither statements nor objects, by name.

        Args:
            ended: The run has ended: what it leaves behind is published.
            complete: The run has a model.

        Raises:
            ConfigError: The model is in none of the folders.
            DilocoxError: The model's folder has other than plain files.
        """
        assert self.found.config is not None
        named: dict[str, Path | bytes] = {"run.toml": agreed(self.found.config).to_toml().encode()}
        if not ended:
            return named
        if self.found.data is not None:
            text = render_croissant(read_manifest(self.found.data)["content"])
            named[f"data/{CROISSANT}"] = text.encode()
        named |= {name: self.folder / name for name in COURSE if (self.folder / name).is_file()}
        for name in (AUDITS, COSIGNED):
            folder = self.folder / "record" / name
            named |= {f"record/{name}/{path.name}": path for path in _plain(folder)}
        if complete:
            if self.found.model is None:
                raise ConfigError(
                    f"{self.folder}: the published model is in none of these folders; name the "
                    "site's run folder that has it with --from"
                )
            check_plain_folder(self.found.model)
            named |= {f"model/{path.name}": path for path in _plain(self.found.model)}
        return named


def _plain(folder: Path) -> Iterator[Path]:
    """Iterate over the plain files of a folder; raise `DilocoxError` for links out of it."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or path.is_dir():
            continue
        reason = unsafe_reason(path, folder)
        if reason:
            raise DilocoxError(f"{path}: {reason}; only plain files are published")
        yield path


def state_of(statement: s.Statement) -> tuple[str, int] | None:
    """Return (kind, stage) of a statement on an initial or final state; None for others."""
    if statement.kind != s.CHECKPOINT:
        return None
    state = State.of(statement, 0)
    return state.kind, state.stage
