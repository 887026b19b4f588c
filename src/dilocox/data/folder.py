"""The folder of token files: made whole or not at all, and used again only for the same options."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dilocox.config.run_config import DataSection, load_written
from dilocox.data.manifest import MANIFEST
from dilocox.data.sources import list_files
from dilocox.data.token_files import TokenFiles
from dilocox.errors import DataError
from dilocox.utils.processes import is_alive
from dilocox.utils.storage import sync_folder


def folder_of_run(run: Path) -> Path:
    """Where the token files of the run in folder `run` are: in its `data`, as they are handed on
    with a run, or else where its run file says.

    Raises `ConfigError` for a run file that cannot be read.
    """
    beside, file = run / "data", run / "run.toml"
    return beside if beside.exists() or not file.exists() else load_written(file).data_folder


def check_place(folder: Path) -> None:
    """Raise `DataError` unless `folder` has token files or can be made, or filled, with them.

    Changes nothing, and does not look into token files that are there.
    """
    try:
        if (folder / MANIFEST).is_file():
            return
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder}: is a file; set data.folder to a folder")
        if _is_mount_point(os.path.realpath(folder)):
            # The files are written beside it, on another disk, and renamed when all is done.
            raise DataError(
                f"{folder}: is a mount point, whose place no finished folder can take; set "
                f"data.folder to a folder below it, such as {folder / 'tokens'}"
            )
        if folder.is_dir() and any(folder.iterdir()):
            raise DataError(
                f"{folder}: not empty and without token files; set data.folder to another folder"
            )
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be looked into ({error.strerror}); name another folder"
        ) from None


def _is_mount_point(folder: str) -> bool:
    """Whether something is mounted at `folder`, an absolute path without links."""
    if os.path.ismount(folder):
        return True
    # Python compares devices, which are the same where a folder is bound within a file system.
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
    """A new folder beside `folder` to write into; gone afterwards unless it was published.

    What a killed process of this machine left beside `folder` is removed first. `folder` is no
    link: beside a link is not where it leads.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = f".{folder.name}.partial-"
    here = f"{start}{socket.gethostname()}-"
    for left in folder.parent.iterdir():
        process = left.name.removeprefix(here)
        if left.name.startswith(here) and process.isdigit() and not is_alive(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    partial = folder.with_name(f"{here}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, folder: Path) -> bool:
    """Give `partial` its name at once; false if another process made `folder` meanwhile."""
    try:
        partial.rename(folder)
    except OSError:
        if (folder / MANIFEST).is_file():
            return False
        raise
    sync_folder(folder.parent)
    return True


def reuse(
    folder: Path,
    data: DataSection,
    names: list[str],
    options: dict[str, Any],
    changed: Callable[[str], None] | None = None,
) -> TokenFiles:
    """Open `folder` if it was made with the same options from files that still are the same.

    `changed` gets a line for every source that is not the same any more, instead of a `DataError`:
    a run that has begun needs its token files, not their sources.
    """
    files = TokenFiles.open(folder)
    made_with = files.manifest["made_with"]["options"]
    # What the version that made them did not know yet, it did not do: they stay what they are.
    other = sorted(key for key in options if made_with.get(key, options[key]) != options[key])
    if other:
        key = other[0]
        raise DataError(
            f"{folder}: its token files were made with other options ({key} "
            f"{made_with.get(key)!r} instead of {options[key]!r}); set data.folder to another "
            "folder or delete this one, or give the same options"
        )
    for name, source in zip(names, files.content["sources"], strict=True):
        if source["kind"] == "files" and Path(name).expanduser().exists():
            # An earlier version, which did not write down what it left out, passed over formats and
            # links that are read now.
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
    """What is not as it was, empty if all is. Names and sizes only: a corpus that grew must not be
    passed over in silence. One that is gone is no reason to refuse."""
    recorded = {file["name"]: file["bytes"] for file in source["files"]}
    found = {file.name: file.size for file in list_files(name, data)}
    other = sorted(key for key in recorded if recorded[key] != found.get(key))
    added = len(found) - len(recorded) - source["skipped_files"]
    if other:
        return str(other[0])
    return f"{added:+,} files" if added and complete else ""
