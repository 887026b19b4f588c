"""Lists the files below a folder in a fixed order, and counts the entries that are left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from dilocox.errors import DataError

HIDDEN = "hidden"
READ_ALREADY = "links to folders that are read already"
BROKEN = "links to nothing"
OTHER = "neither files nor folders"

_PASSED_OVER = ("__pycache__", "site-packages")

Identity = tuple[int, int]


def walk(root: Path, *, links: bool) -> tuple[list[tuple[str, Path]], Counter[str]]:
    """List the files below `root`.

    Hidden files and folders, `__pycache__` and `site-packages` are left out. With `links`, each
    linked folder is followed once, after all real folders. Links to a parent folder of `root` are
    not followed. So there are no loops, and a file keeps its name when a link to it is added.

    Returns (files, left out). Files are sorted pairs of the POSIX name relative to `root` and the
    path. `left out` counts the other entries by reason. Raises `DataError` if a folder cannot be
    read.
    """
    found: list[tuple[str, Path]] = []
    left: Counter[str] = Counter()
    seen: set[Identity] = set()
    above = {_identity(folder) for folder in root.resolve().parents}
    queue = [root]
    while queue:
        start, linked = queue.pop(0), []
        if _identity(start) in seen | above:
            left[READ_ALREADY] += 1
            continue
        for folder, inner, names in os.walk(start, onerror=_unreadable):
            here = Path(folder)
            if _identity(here) in seen:
                inner[:] = []
                continue
            seen.add(_identity(here))
            shown = sorted(name for name in inner if not _hidden(name))
            left[HIDDEN] += len(inner) - len(shown)
            inner[:] = [name for name in shown if not (here / name).is_symlink()]
            linked += [here / name for name in shown if (here / name).is_symlink()]
            for name in names:
                path = here / name
                if _hidden(name):
                    left[HIDDEN] += 1
                elif path.is_file():
                    found.append((path.relative_to(root).as_posix(), path))
                else:
                    left[BROKEN if path.is_symlink() else OTHER] += 1
        queue += sorted(linked) if links else []
    return sorted(found), +left


def counted(left: Mapping[str, int]) -> str:
    """Returns reasons with their counts as text, the most frequent first."""
    ordered = sorted(left.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name in _PASSED_OVER


def _identity(folder: Path) -> Identity:
    try:
        status = folder.stat()
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from None
    return status.st_dev, status.st_ino


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})")
