"""Checks of the files in a published model's folder other than tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.log.state_statements import State
from dilocox.utils.storage import sha256_of

TENSORS = ".safetensors"
RELEASED = ("README.md", "croissant.json", "model.sig")
"""Files that a release adds to a published folder. No model is loaded from them, and the release's
own signature covers them."""


def check_plain_files(folder: Path) -> None:
    """Raise `RecordError` for a pipe or a device below `folder`, because reading it may never end.

    Links are followed, because hubs keep a model's files elsewhere and link to them.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_file() and not path.is_dir():
            raise RecordError(f"{path}: not a file; a published model is plain files")


def other_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256, hex, by name of the files in `folder` that are published without tensors.

    Hidden files and the files of a release are left out.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix != TENSORS and _published(path.name):
            found[path.name] = sha256_of(path)
    return found


def _published(name: str) -> bool:
    return not name.startswith(".") and name not in RELEASED


def published_files(finals: Sequence[State]) -> dict[str, str]:
    """Return `other_files` at the time of publication, as all sites signed it.

    `finals`: final states of stage 0, whose first rank signs for its site; a site's last state
    counts. Raises `RecordError` if sites signed different files, because then it is unknown which
    files the run published.
    """
    by_site = {state.site: dict(state.files) for state in finals}
    (first, files), *others = by_site.items()
    for site, own in others:
        unlike = sorted(
            name for name in files.keys() | own.keys() if files.get(name) != own.get(name)
        )
        if unlike:
            raise RecordError(f"{first} and {site} have signed different {', '.join(unlike)}")
    return files


def check_other_files(folder: Path, signed: Mapping[str, str]) -> None:
    """Raise `RecordError` naming a file of `folder` that differs from the `signed` digests."""
    found = other_files(folder)
    for name in sorted(signed.keys() | found.keys()):
        if name not in found:
            raise RecordError(f"{folder / name}: missing")
        if name not in signed:
            raise RecordError(f"{folder / name}: was not there when the model was published")
        if signed[name] != found[name]:
            raise RecordError(f"{folder / name}: was changed after the model was published")
