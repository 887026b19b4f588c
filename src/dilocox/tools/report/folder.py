"""Reads the files of a run's folder for its page.

A missing or damaged file raises no error; it becomes a line of `RunFiles.missing`.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.data.folder import folder_of_run
from dilocox.data.manifest import MANIFEST, read_manifest
from dilocox.errors import ConfigError, DataError, ModelError, RecordError
from dilocox.record.log.audit_verdicts import Signed, paths_of
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import (
    CHECKPOINT,
    ENTRIES,
    PUBLIC,
    as_signed,
    check_log,
    read_covered,
    read_text,
)
from dilocox.record.log.verdict_statements import read_file
from dilocox.record.verify.run_history import RunHistory, read_history
from dilocox.record.verify.verdict_validity import not_replaced, still_standing
from dilocox.tools.report.history import Record
from dilocox.utils.adapter_files import ADAPTER_FILE, is_adapter_folder
from dilocox.utils.json_lines import lines_of_text, object_of

WATCHED = (
    "metrics.jsonl", "summary.json", "run.toml", f"record/{CHECKPOINT}", "record/audits",
    "model", "checkpoints",
)  # fmt: skip
"""Files and folders below the run folder that change while a run goes on."""


@dataclass(frozen=True)
class Written:
    """A checkpoint in the folder that the run can be resumed from."""

    tick: int
    """Slots since the start of the run."""
    ranks: tuple[tuple[str, str], ...]
    """(SITE/STAGE-SHARD, SHA-256 of the list of its files), sorted."""


@dataclass(frozen=True)
class Recorded:
    """A run's record, after the log and every signature were checked."""

    course: RunHistory
    entries: Sequence[str]
    """All entries of the log."""
    checkpoint: str
    """The log's signed checkpoint, as text that a reader can save."""


@dataclass
class RunFiles:
    """Contents of a run's folder, as far as they could be read."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run file, as plain values."""
    config_text: str = ""
    metrics: list[Record] = field(default_factory=list)
    bad_lines: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    record: Recorded | None = None
    data: Mapping[str, Any] | None = None
    """The token files' manifest."""
    data_folder: Path | None = None
    model: list[tuple[str, int]] = field(default_factory=list)
    """(name, bytes) of the published model's files."""
    parameters: int | None = None
    """Number of values of the published model, or of its adapters."""
    adapters: bool = False
    """Whether the published model is a folder of adapters."""
    checkpoints: list[Written] = field(default_factory=list)
    audits: list[Signed] = field(default_factory=list)
    """Verdicts, each signed by the auditor's key that it names."""
    standing: list[Signed] = field(default_factory=list)
    """Verdicts of `audits` that still count: no resume has abandoned their rounds, and their
    auditors have not replaced the verdicts. Without a record, all verdicts count."""
    missing: list[str] = field(default_factory=list)
    """One line per file that could not be read, with the reason."""


def read_run(folder: Path, model: Path | None = None, data: Path | None = None) -> RunFiles:
    """Read everything that the page shows of the run in `folder`.

    `model`, `data`: folders of the published model and of the token files (or their manifest).
    They are needed if these lie outside the run folder, as in a run over a network. Raises
    `ConfigError` if `folder` has neither a run file nor metrics.
    """
    if not (folder / "run.toml").is_file() and not (folder / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{folder}: no run is here (no run.toml, no metrics.jsonl); give the folder of a run, "
            "such as runs/quickstart"
        )
    files = RunFiles(folder)
    _read_config(files)
    _read_metrics(files)
    _read_summary(files)
    _read_record(files)
    _read_data(files, data)
    _read_model(files, model)
    _read_checkpoints(files)
    _read_audits(files)
    return files


def stamp(folder: Path) -> str:
    """Return a digest that changes whenever a file that the page shows changes."""
    total = hashlib.sha256()
    for name in WATCHED:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        total.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return total.hexdigest()[:16]


def _read_config(files: RunFiles) -> None:
    text = _text(files, "run.toml", "the run file")
    try:
        files.config, files.config_text = tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        files.missing.append(f"run.toml: not valid TOML ({error})")


def _read_metrics(files: RunFiles) -> None:
    # Only line feeds end a line, as for `dilocox verify`.
    for line in lines_of_text(_text(files, "metrics.jsonl", "curves and events", newline="\n")):
        record = object_of(line)
        if record is None:
            files.bad_lines += 1
        else:
            files.metrics.append(record)


def _read_summary(files: RunFiles) -> None:
    text = _text(files, "summary.json", "the result of the run; written at its end")
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        files.summary = found
    else:
        files.missing.append("summary.json: damaged; totals are counted from the rounds")


def _text(files: RunFiles, name: str, what: str, newline: str | None = None) -> str:
    """Return the text of a file, empty if it cannot be read. `newline`: as for `open`."""
    try:
        with (files.folder / name).open(
            encoding="utf-8", errors="replace", newline=newline
        ) as file:
            return file.read()
    except FileNotFoundError:
        files.missing.append(f"{name}: not there ({what})")
    except OSError as error:
        files.missing.append(f"{name}: cannot be read ({error.strerror})")
    return ""


def _read_record(files: RunFiles) -> None:
    folder = files.folder / "record"
    if not (folder / ENTRIES).is_file():
        off = _below(files.config, "record").get("enabled") is False
        files.missing.append(
            "record: off in the run file (record.enabled = false); nobody can verify this run"
            if off
            else "record: not there; digests, keys and states are not shown"
        )
        return
    try:
        key = NoteKey.parse(read_text(folder / PUBLIC).strip())
        content = read_covered(folder, key)
        check_log(content, key)
        course = read_history(as_signed(content, key), key)
    except RecordError as error:
        files.missing.append(f"record: not shown, it is damaged ({error})")
        return
    files.record = Recorded(course, content.entries, content.note)


def _read_data(files: RunFiles, named: Path | None) -> None:
    try:
        folder = named or folder_of_run(files.folder)
    except ConfigError as error:
        files.missing.append(f"token files: {error}")
        return
    if not (folder / MANIFEST).is_file():
        files.missing.append(
            f"token files: no manifest in {folder} (sources, licences, digests); give its folder "
            "with --data"
        )
        return
    try:
        files.data, files.data_folder = read_manifest(folder), folder
    except DataError as error:
        files.missing.append(f"token files: {error}")


def _read_model(files: RunFiles, named: Path | None) -> None:
    folder = named or files.folder / "model"
    if not folder.is_dir():
        # In a run over a network the model is in the folders of the sites.
        done = files.summary.get("phase") == "finished"
        files.missing.append(
            f"model: not in {folder}; give its folder with --model (it is in a site's run folder)"
            if done or named
            else "model: not published yet (model/ is not there)"
        )
        return
    files.model = sorted(
        (path.name, path.stat().st_size)
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".")
    )
    files.adapters = is_adapter_folder(folder)
    if files.adapters:
        from dilocox.models.base_weights import parameters_of  # imports torch

        try:
            files.parameters = parameters_of(folder / ADAPTER_FILE)
        except ModelError as error:
            files.missing.append(f"model: {error}")
        return
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        files.parameters = int(index["metadata"]["total_parameters"])
    except (OSError, ValueError, KeyError, TypeError):
        files.missing.append("model: its index does not give the number of parameters")


def _read_checkpoints(files: RunFiles) -> None:
    found: dict[int, list[tuple[str, str]]] = {}
    for path in (files.folder / "checkpoints").glob("tick-*/*/*/*/files.json"):
        tick, site, rank = path.parts[-5:-2]
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found.setdefault(int(tick.removeprefix("tick-")), []).append((f"{site}/{rank}", digest))
        except (OSError, ValueError):
            continue  # just being written, or deleted for a newer one
    files.checkpoints = [Written(tick, tuple(sorted(found[tick]))) for tick in sorted(found)]


def _read_audits(files: RunFiles) -> None:
    record, there = files.record, []
    for path in paths_of(files.folder):
        try:
            there.append(read_file(path, None if record is None else record.course.run))
        except RecordError as error:
            files.missing.append(f"record/audits/{path.name}: not shown ({error})")
    files.audits = [each.signed for each in there]
    try:
        if record is None:
            files.standing = list(files.audits)
        else:
            counting = [each.signed for each in not_replaced(record.course, there)]
            files.standing = still_standing(record.course, record.entries, counting)
    except RecordError as error:
        files.missing.append(f"record/audits: not counted ({error})")


def _below(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = config.get(section)
    return found if isinstance(found, dict) else {}
