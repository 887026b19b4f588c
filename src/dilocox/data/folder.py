"""The folder of token files: created atomically, and reused only for the same options."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dilocox.config.data import DataSection
from dilocox.config.preference import REFERENCE
from dilocox.config.run_config import load_written
from dilocox.data.columns import check_same_columns
from dilocox.data.manifest import MANIFEST
from dilocox.data.source_groups import Named
from dilocox.data.sources import list_files
from dilocox.data.token_files import TokenFiles
from dilocox.errors import DataError
from dilocox.utils.processes import is_alive
from dilocox.utils.storage import sync_folder


def folder_of_run(run: Path) -> Path:
    """Returns the folder of the token files of the run in folder `run`.

    If `run/data` exists, it is the folder, since copies of a run have token files there. Otherwise
    the run file names the folder. Raises `ConfigError` if the run file cannot be read.
    """
    beside, file = run / "data", run / "run.toml"
    return beside if beside.exists() or not file.exists() else load_written(file).data_folder


def check_place(folder: Path) -> None:
    """Raise `DataError` unless `folder` has token files, is empty, or can be created.

    A mount point without token files is refused. The check changes nothing and does not read
    existing token files.
    """
    try:
        if (folder / MANIFEST).is_file():
            return
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder}: is a file; set data.folder to a folder")
        if _is_mount_point(os.path.realpath(folder)):
            # The files are written to a folder beside `folder`, which is renamed at the end. A
            # rename cannot replace a mount point.
            raise DataError(
                f"{folder}: is a mount point, which cannot be replaced by the finished folder; set "
                f"data.folder to a folder below it, such as {folder / 'tokens'}"
            )
        if folder.is_dir() and any(folder.iterdir()):
            raise DataError(
                f"{folder}: not empty and without token files; set data.folder to another folder"
            )
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be read ({error.strerror}); name another folder"
        ) from None


def _is_mount_point(folder: str) -> bool:
    """Returns whether `folder`, an absolute path without links, is a mount point."""
    if os.path.ismount(folder):
        return True
    # `ismount` compares devices, and misses bind mounts within one file system.
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return False
    written = os.fsencode(folder)
    for character in b"\\ \t\n":
        written = written.replace(bytes([character]), b"\\%03o" % character)
    return any(line.split(b" ")[4:5] == [written] for line in lines)


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Within this context, provide a new folder beside `folder` to write into.

    The new folder is removed at the end unless `publish` has renamed it. Leftovers of killed
    processes of this machine are removed first. `folder` must not be a link, because the folder
    beside a link may be on another disk than the link's target.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = f".{folder.name}.partial-"
    here = f"{start}{socket.gethostname()}-"
    for left in folder.parent.iterdir():
        process = left.name.removeprefix(here).removesuffix(OLD)
        if left.name.startswith(here) and process.isdigit() and not is_alive(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    partial = folder.with_name(f"{here}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def named_as(partial: Path, folder: Path) -> Iterator[None]:
    """Within this context, a `DataError` about `partial` names `folder`, which is there later."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(str(partial), str(folder))) from None


def publish(partial: Path, folder: Path, *, replace: bool = False) -> bool:
    """Rename `partial` to `folder` atomically. With `replace`, remove what `folder` held before.

    Returns False if another process has published `folder` in the meantime. Raises `OSError` if
    the rename fails for another reason.
    """
    old = partial.with_name(f"{partial.name}{OLD}")
    try:
        if replace:
            folder.rename(old)
        partial.rename(folder)
    except OSError:
        if (folder / MANIFEST).is_file() and not replace:
            return False
        raise
    sync_folder(folder.parent)
    if replace:
        shutil.rmtree(old, ignore_errors=True)
    return True


OLD = "-old"
"""End of the name of a folder that has been replaced and is about to be removed."""

FILTERS = ("filter", "validation_filter")
"""Options that are left out of a manifest if they are not set, as earlier versions did."""


def without_unset(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options of token files without filters that are not set."""
    kept = {key: value for key, value in options.items() if key not in FILTERS or value}
    if kept.get("sources"):
        kept["sources"] = [without_unset(each) for each in kept["sources"]]
    return kept


def _with_filters(options: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(FILTERS) | options


def reuse(
    folder: Path,
    named: list[Named],
    options: dict[str, Any],
    changed: Callable[[str], None] | None = None,
) -> TokenFiles:
    """Open the token files in `folder` if their options and sources have not changed.

    Args:
        folder: folder with token files.
        named: names of the sources and their keys, in the manifest's order.
        options: options that decide the content of the token files.
        changed: is called with a message for each source that has changed. A resumed run passes it,
            since such a run needs the token files but not their sources. If None, a change raises.

    Raises:
        DataError: if the files were made with other options, if a source has changed and `changed`
            is None, or if the files are damaged.
    """
    files = TokenFiles.open(folder)
    made_with = files.manifest["made_with"]["options"]
    made_with, options = _with_filters(made_with), _with_filters(options)
    # An option that the version which made the files did not know counts as equal: that version
    # did not have its effect, and the files stay as they are.
    other = sorted(key for key in options if made_with.get(key, options[key]) != options[key])
    if other:
        key = other[0]
        raise DataError(
            f"{folder}: its token files were made with other options ({key} "
            f"{made_with.get(key)!r} instead of {options[key]!r}); set data.folder to another "
            "folder or delete this one, or give the same options"
        )
    pairs = options["format"] == "preference"
    wanted = [REFERENCE] if pairs else options.get("columns", [])
    check_same_columns(folder, files.column_names, wanted)
    names = [(name, group.data) for group in named for name in group.names]
    for (name, data), source in zip(names, files.content["sources"], strict=True):
        if source["kind"] == "files" and Path(name).expanduser().exists():
            # Versions that did not record "left_out" ignored formats and links that are read now,
            # so added files do not mean that the source has changed.
            complete = "left_out" in files.manifest["made_with"]
            what = _change(name, source, data, complete)
            if what and changed is None:
                raise DataError(
                    f"{folder}: data.source {name} has changed since these token files were made "
                    f"({what}); set data.folder to another folder or delete this one"
                )
            if what and changed is not None:
                changed(
                    f"data.source {name} has changed since the token files in {folder} were made "
                    f"({what}); the run goes on with the token files that it began with"
                )
    return files


def _change(name: str, source: dict[str, Any], data: DataSection, complete: bool) -> str:
    """Returns what has changed in source `name`, as text, or "" if nothing has.

    Only names and sizes are compared. Added files are reported only if `complete`, which means that
    the manifest accounts for all files of the source.
    """
    recorded = {file["name"]: file["bytes"] for file in source["files"]}
    found = {file.name: file.size for file in list_files(name, data)}
    other = sorted(key for key in recorded if recorded[key] != found.get(key))
    added = len(found) - len(recorded) - source["skipped_files"]
    if other:
        return str(other[0])
    return f"{added:+,} files" if added and complete else ""
