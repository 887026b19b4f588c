"""`dilocox publish RUN --to DIR`: writes one folder with everything needed to check a run.

The parts of a run over a network lie on several machines: the log at the coordinator, payloads and
the model at the sites. This module copies them to one folder, verifies the folder, and checks that
it holds no private keys or tokens.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig, load_written, resolve_run
from dilocox.coordinator.record_keys import FOLDER as PRIVATE
from dilocox.data.croissant import CROISSANT, render_croissant
from dilocox.data.manifest import MANIFEST, read_manifest
from dilocox.errors import CheckpointError, ConfigError, DilocoxError, RecordError
from dilocox.record.log.blob_store import BF16, STATES
from dilocox.record.log.transparency_log import CHECKPOINT, ENTRIES, PUBLIC
from dilocox.record.verify.places import Places
from dilocox.record.verify.report_json import as_json
from dilocox.record.verify.verify import Report, verify
from dilocox.tools.release.check_text import CHECK, check_text
from dilocox.tools.report.folder import read_run
from dilocox.tools.report.page import build
from dilocox.tools.report.render import render
from dilocox.training.run_model import check_plain_folder
from dilocox.utils.storage import is_local, opened, sha256_of, unsafe_reason

LOG_FILES = (ENTRIES, CHECKPOINT, PUBLIC)
COURSE = ("metrics.jsonl", "summary.json", "ledger.json")
"""Files about the course of the run that are not part of the record. The last may be missing."""
KEYS = ("token", "secret", "token-secret", "record-key")
"""Files of the coordinator's folder whose whole content is secret."""
_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bdilocox1-[0-9a-f]{64}-[0-9a-f]{32}")
_OBJECT = re.compile(rf"[0-9a-f]{{2}}/[0-9a-f]{{62}}({re.escape(BF16)})?")
_SCANNED = 256 * 1024**2
"""Bytes: larger files are not searched for secrets. Payloads and weights are never searched."""


@dataclass
class Sources:
    """Places of the parts of a run."""

    run: Path
    config: RunConfig | None = None
    model: Path | None = None
    data: Path | None = None
    """Folder of the token files that all sites share."""
    stores: list[str] = field(default_factory=list)
    """Folders or addresses of the stores that hold payloads."""
    missing: list[str] = field(default_factory=list)
    """One text per part that was not found."""


@dataclass(frozen=True)
class Published:
    """A folder that was published."""

    folder: Path
    objects: int
    """Number of payloads and states that were copied from stores."""
    size: int
    """Bytes of all files."""
    report: Report


def find(run: Path, sites: Sequence[Path] = (), stores: Sequence[str] = ()) -> Sources:
    """Find the parts of a run.

    `run`: run folder of the coordinator. `sites`: run folders of sites, which are searched too.
    `stores`: further stores with payloads. Parts that were not found are in `Sources.missing`.
    """
    found = Sources(run)
    folders = [run, *sites]
    for folder in folders:
        if not folder.is_dir():
            found.missing.append(f"{folder}: no such folder")
    try:
        found.config = load_written(run / "run.toml")
    except ConfigError as error:
        found.missing.append(f"the run file ({error})")
    for name in (*(f"record/{each}" for each in LOG_FILES), *COURSE[:2]):
        if not (run / name).is_file():
            found.missing.append(f"{run / name}")
    found.model = _first(folder / "model" for folder in folders)
    if found.model is None:
        found.missing.append("the published model (no model/ in any of these folders)")
    named = [] if found.config is None else [found.config.data_folder]
    tokens = [*(folder / "data" for folder in folders), *named]
    found.data = _first(each for each in tokens if (each / MANIFEST).is_file())
    if found.data is None:
        found.missing.append(f"the token files' {MANIFEST} (no data/ in any of these folders)")
    places = [*(folder / "record" / "store" for folder in folders)]
    found.stores = [str(each) for each in places if each.is_dir()]
    own = None if found.config is None else found.config.record_store
    if own is not None and own not in found.stores and ("://" in own or Path(own).is_dir()):
        found.stores.append(own)
    found.stores += stores
    if not found.stores:
        found.missing.append("payloads (no record/store in any of these folders, no --store)")
    return found


def publish(
    sources: Sources,
    to: Path,
    *,
    link: bool = False,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Published:
    """Copy a run to the new folder `to`, and verify it there.

    Args:
        sources: Places of the parts of the run (`find`).
        to: Folder to write; it must be empty or not exist. It is removed if an error occurs.
        link: Use hard links instead of copies for stores on the same disk.
        progress: Called with the current task and its share that is done, 0 to 1.

    Raises:
        ConfigError: Parts of the run are missing; the message names all of them.
        DilocoxError: The folder cannot be written, does not verify, or holds a secret.
    """
    if sources.missing or sources.config is None:
        raise ConfigError(
            f"{sources.run}: cannot be published, missing: {'; '.join(sources.missing)}; name the "
            "sites' run folders that have it with --from, and other stores with --store"
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise CheckpointError(f"{to}: is not empty; choose another folder")
    made = not to.exists()
    try:
        _gather(sources, sources.config, to)
        objects = _gather_objects(sources.stores, to / "record" / "store", link, progress)
        report = _verified(to, progress)
        _write_page(sources, to, report)
        refuse_secrets(to, secrets_of(sources))
    except BaseException as error:
        shutil.rmtree(to, ignore_errors=True)
        if not made:
            to.mkdir(exist_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{to}: cannot be written ({error.strerror or error}); choose another folder"
            ) from None
        raise
    size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
    return Published(to, objects, size, report)


def _first(places: Iterator[Path]) -> Path | None:
    return next((each for each in places if each.is_dir()), None)


def _gather(sources: Sources, config: RunConfig, to: Path) -> None:
    """Copy everything except the payloads and the page."""
    assert sources.model is not None
    assert sources.data is not None
    (to / "record" / "store").mkdir(parents=True)
    (to / "run.toml").write_text(agreed(config).to_toml(), encoding="utf-8")
    for name in COURSE:
        if (sources.run / name).is_file():
            _copy(sources.run / name, to / name, sources.run)
    record = sources.run / "record"
    for path in sorted(record.rglob("*")):
        below = path.relative_to(record)
        if path.is_file() and below.parts[0] != "store" and not path.name.startswith("."):
            _copy(path, to / "record" / below, record)
    # The token files are not published; `data` of a published run only describes them.
    (to / "data").mkdir()
    text = render_croissant(read_manifest(sources.data)["content"])
    (to / "data" / CROISSANT).write_text(text, encoding="utf-8")
    check_plain_folder(sources.model)
    for path in sorted(sources.model.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            _copy(path, to / "model" / path.name, sources.model)


def agreed(config: RunConfig) -> RunConfig:
    """Return the run file without the settings of single machines: folders, addresses, ports and
    devices."""

    def said(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: said(each) for key, each in value.items() if each is not None}
        return value

    raw = said(config.shared())
    for site in raw["sites"].values():
        if site.pop("data", False):
            site["data"] = "private"
    return resolve_run(raw, where="the published run.toml")


def _copy(path: Path, target: Path, folder: Path) -> None:
    """Copy a file, and make the copy readable for everybody.

    Raises `RecordError` if the file is not a plain file inside `folder`, such as a pipe or a link
    out of it.
    """
    reason = unsafe_reason(path, folder)
    if reason:
        raise RecordError(f"{path}: {reason}; only plain files are published")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    target.chmod(0o644)


def _gather_objects(
    stores: Sequence[str], to: Path, link: bool, progress: Callable[[str, float], None]
) -> int:
    """Copy the objects of all stores to one folder, and return their number.

    States that only audits need are not copied. Objects of windows (`record.keep`) go to the same
    folder as all others, because a web server does not list folders.
    """
    count = 0
    for where in stores:
        try:
            files, root = opened(where)
            # Each kind of storage raises exceptions of its own through fsspec.
            paths = [str(each) for each in files.find(root)]
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{where}: cannot be listed ({reason})") from None
        local, start = is_local(files), root.rstrip("/")
        for number, path in enumerate(paths):
            progress(f"copying {where}", number / len(paths))
            name = "/".join(path.rsplit("/", 2)[1:])
            if f"/{STATES}/" in path.removeprefix(start) or not _OBJECT.fullmatch(name):
                continue
            target = to / "sha256" / name
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            _fetch(files, path, target, local, link, Path(root))
            if path.endswith(BF16) or sha256_of(target) == name.replace("/", ""):
                count += 1
            else:
                target.unlink()  # incomplete or damaged: another store may have it whole
    return count


def _fetch(files: Any, path: str, target: Path, local: bool, link: bool, root: Path) -> None:
    if local and link and not unsafe_reason(Path(path), root):
        try:
            os.link(path, target)
        except OSError:
            link = False  # another disk, or a file system without hard links
        else:
            return
    if local:
        _copy(Path(path), target, root)
        return
    try:
        files.get_file(path, str(target))
    except Exception as error:  # every kind of storage has errors of its own
        raise RecordError(f"{path}: cannot be fetched ({error})") from None
    target.chmod(0o644)


def _verified(folder: Path, progress: Callable[[str, float], None]) -> Report:
    """Verify `folder` and return the report. Raises `RecordError` unless required claims PASS."""
    report = verify(Places(folder), progress)
    if report.exit_code == 0:
        return report
    bad = [
        f"{each.claim.name} {each.verdict} ({each.reason.replace(f'{folder}/', '')})"
        for each in report.findings
        if each.verdict == "FAIL" or (each.claim.required and each.verdict != "PASS")
    ]
    mend = (
        "name the other sites' run folders with --from, or their stores with --store"
        if all(each.verdict != "FAIL" for each in report.findings)
        else "put back the files as the run has written them"
    )
    raise RecordError(
        f"{folder}: not published, because the copy does not verify: {'; '.join(bad)}; {mend}"
    )


def _write_page(sources: Sources, to: Path, report: Report) -> None:
    """Write `report.html` and `CHECK.md`, without paths of this machine."""
    assert sources.data is not None
    files = read_run(to)
    files.data, files.data_folder = read_manifest(sources.data), Path("data")
    files.missing = [line for line in files.missing if not line.startswith("token files:")]
    claims = as_json(report)
    for claim in claims["claims"]:
        claim["reason"] = claim["reason"].replace(f"{to}/", "")
    page = build(files, time.time(), claims)
    (to / "report.html").write_text(render(page), encoding="utf-8")
    (to / CHECK).write_text(check_text(page, report, files), encoding="utf-8")


def secrets_of(sources: Sources) -> list[bytes]:
    """Return the secrets of the coordinator's folder, and the keys of sites in the run folder."""
    found = []
    places = [sources.run / "coordinator" / name for name in KEYS]
    for place in [*places, *(sources.run / PRIVATE).glob("*.key")]:
        try:
            text = place.read_bytes().strip()
        except OSError:
            continue  # this secret is not on this machine, so it cannot have been copied
        if len(text) >= 16:
            found.append(text)
    return found


def refuse_secrets(folder: Path, secrets: Sequence[bytes]) -> None:
    """Raise `DilocoxError` if a file of `folder` holds a private key, a join token or one of
    `secrets`. Payloads and weights are numbers, and are not searched."""
    for path in sorted(folder.rglob("*")):
        numbers = path.suffix == ".safetensors" or "store" in path.relative_to(folder).parts
        if not path.is_file() or numbers or path.stat().st_size > _SCANNED:
            continue
        refuse_secret(str(path.relative_to(folder)), path.read_bytes(), secrets)


def refuse_secret(name: str, content: bytes, secrets: Sequence[bytes]) -> None:
    """Raise `DilocoxError` if `content`, of file `name`, holds a private key, a join token or one
    of `secrets`."""
    if _PRIVATE.search(content) or any(each in content for each in secrets):
        raise DilocoxError(f"{name}: holds a key or a token; remove it there, and publish again")
