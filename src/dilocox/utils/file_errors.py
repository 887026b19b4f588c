"""Files and folders that the user names: which names are folders, and why one cannot be used."""

from __future__ import annotations

import errno
import os

_RIGHT = "give this user the right to it, or name another place"
_ROOM = "free disk space"
_MENDS = {
    errno.EACCES: _RIGHT,
    errno.EPERM: _RIGHT,
    errno.EROFS: "name a place that can be written to",
    errno.ENOENT: "check its name",
    errno.EEXIST: "move it away, or name another place",
    errno.ENOTDIR: "a part of its path is a file, so name another place",
    errno.EISDIR: "it is a folder, so name a file",
    errno.ENOTEMPTY: "empty it, or name another place",
    errno.ELOOP: "its links lead in a circle, so name another place",
    errno.ENAMETOOLONG: "name a shorter one",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
}
"""Remedies by error number."""


def names_folder(place: str) -> bool:
    """Return whether `place` can only be a folder, because no name on a hub has this form."""
    return place.startswith(("/", ".", "~")) or place.count("/") > 1


def file_problem(error: BaseException) -> str | None:
    """Return what is wrong with a file, with the remedy; None if `error` does not say.

    The system names no file if a write fails.
    """
    if not isinstance(error, OSError) or error.errno not in _MENDS:
        return None
    mend, name = _MENDS[error.errno], error.filename
    if isinstance(name, str | bytes):
        return f"{os.fsdecode(name)}: cannot be used ({error.strerror}); {mend}"
    return f"a file cannot be written ({error.strerror}); {mend}" if mend == _ROOM else None
