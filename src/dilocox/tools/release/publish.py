"""`dilocox publish RUN --to DIR`: one folder with all that a stranger needs to check a run.

The parts of a run over a network lie apart: the log at the coordinator, payloads and the model at
the sites. They are gathered, and the folder is verified before anybody gets it. Keys and tokens
stay where they are.
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
from dilocox.record.verify.report_json import as_json
from dilocox.record.verify.verify import Places, Report, verify
from dilocox.tools.release.check_text import CHECK, check_text
from dilocox.tools.report.folder import read_run
from dilocox.tools.report.page import build
from dilocox.tools.report.render import render
from dilocox.training.run_model import check_plain_folder
from dilocox.utils.storage import is_local, opened, sha256_of, unsafe_reason

LOG_FILES = (ENTRIES, CHECKPOINT, PUBLIC)
COURSE = ("metrics.jsonl", "summary.json", "ledger.json")
"""What happened, beside the record. The last one may be missing."""
KEYS = ("token", "secret", "token-secret", "record-key")
"""Files of the coordinator's folder whose whole text is a secret."""
_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bdilocox1-[0-9a-f]{64}-[0-9a-f]{32}")
_OBJECT = re.compile(rf"[0-9a-f]{{2}}/[0-9a-f]{{62}}({re.escape(BF16)})?")
_SCANNED = 256 * 1024**2
"""Bytes of the largest file, payloads and weights aside, that is looked through for secrets."""


@dataclass
class Sources:
    """Where the parts of a run are."""

    run: Path
    config: RunConfig | None = None
    model: Path | None = None
    data: Path | None = None
    """Folder of the token files that all sites share."""
    stores: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Published:
    """What was written."""

    folder: Path
    objects: int
    """Payloads and states of the record."""
    size: int
    """Bytes of all files."""
    report: Report


def find(run: Path, sites: Sequence[Path] = (), stores: Sequence[str] = ()) -> Sources:
    """The parts of the run in `run`, looked for in the folders of its `sites`, too."""
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
    """Gather a run in the new folder `to`, and verify it there.

    `link`: hard links in place of copies where a store is on the same disk. Raises `ConfigError`
    for what is missing, all in one line, and `DilocoxError` if the folder cannot be written or
    does not verify: then it is removed.
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
        refuse_secrets(to, _secrets(sources))
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
    """All but the payloads and the page."""
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
    # Without the token files themselves: `data` of a published run says what they were.
    (to / "data").mkdir()
    text = render_croissant(read_manifest(sources.data)["content"])
    (to / "data" / CROISSANT).write_text(text, encoding="utf-8")
    check_plain_folder(sources.model)
    for path in sorted(sources.model.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            _copy(path, to / "model" / path.name, sources.model)


def agreed(config: RunConfig) -> RunConfig:
    """The run file without what is one machine's own: folders, addresses, ports, devices."""

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
    """A file that everybody may read. Raises `RecordError` for a link out of `folder`, a pipe."""
    reason = unsafe_reason(path, folder)
    if reason:
        raise RecordError(f"{path}: {reason}; only plain files are published")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    target.chmod(0o644)


def _gather_objects(
    stores: Sequence[str], to: Path, link: bool, progress: Callable[[str, float], None]
) -> int:
    """Copy the objects of all stores; how many. States that only audits need stay.

    Objects of windows (see `record.keep`) go where all others are: a web server lists no folders.
    """
    count = 0
    for where in stores:
        try:
            files, root = opened(where)
            # fsspec's own errors are those of each kind of storage.
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
                target.unlink()  # half of it, or damaged: another store may have it whole
    return count


def _fetch(files: Any, path: str, target: Path, local: bool, link: bool, root: Path) -> None:
    if local and link and not unsafe_reason(Path(path), root):
        try:
            os.link(path, target)
        except OSError:
            link = False  # another disk, or one without links
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
    """The verdicts on a folder. Raises `RecordError` unless all that is required PASS."""
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
        f"{folder}: not published, what was gathered does not verify: {'; '.join(bad)}; {mend}"
    )


def _write_page(sources: Sources, to: Path, report: Report) -> None:
    """`report.html` and `CHECK.md`. They name no place of this machine."""
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


def _secrets(sources: Sources) -> list[bytes]:
    """Texts of the coordinator's folder, and keys of sites here, that nobody else may read."""
    found = []
    places = [sources.run / "coordinator" / name for name in KEYS]
    for place in [*places, *(sources.run / PRIVATE).glob("*.key")]:
        try:
            text = place.read_bytes().strip()
        except OSError:
            continue  # it is not here, and so is not what was copied
        if len(text) >= 16:
            found.append(text)
    return found


def refuse_secrets(folder: Path, secrets: Sequence[bytes]) -> None:
    """Raise `DilocoxError` if a file of `folder` holds a private key, a join token or one of
    `secrets`. Payloads and weights are numbers, and not looked through."""
    for path in sorted(folder.rglob("*")):
        numbers = path.suffix == ".safetensors" or "store" in path.relative_to(folder).parts
        if not path.is_file() or numbers or path.stat().st_size > _SCANNED:
            continue
        content = path.read_bytes()
        if _PRIVATE.search(content) or any(each in content for each in secrets):
            raise DilocoxError(
                f"{path.relative_to(folder)}: holds a key or a token; remove it there, and publish "
                "again"
            )
