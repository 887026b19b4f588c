"""What lies in a published model's folder beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.log.state_statements import State
from dilocox.utils.storage import sha256_of

TENSORS = ".safetensors"
RELEASED = ("README.md", "croissant.json", "model.sig")
"""What a release adds to a published folder: nothing that a model is loaded from. The release's own
signature covers them."""


def check_plain_files(folder: Path) -> None:
    """Raise `RecordError` for a pipe or a device below `folder`: reading one may never end.

    Links are followed: hubs keep a model's files elsewhere and link to them.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_file() and not path.is_dir():
            raise RecordError(f"{path}: not a file; a published model is plain files")


def other_files(folder: Path) -> dict[str, str]:
    """SHA-256, hex, by name of all files in `folder` that hold no tensors and come with a model."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix != TENSORS and _published(path.name):
            found[path.name] = sha256_of(path)
    return found


def _published(name: str) -> bool:
    return not name.startswith(".") and name not in RELEASED


def published_files(finals: Sequence[State]) -> dict[str, str]:
    """What `other_files` was when the model was published, as all sites have signed it.

    `finals`: final states of stage 0, whose first rank speaks for its site; of a site the last
    counts. Raises `RecordError` where sites have signed different files: which of them the run has
    published nobody could say.
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
    """Raises `RecordError` naming a file of `folder` that is not as it was signed."""
    found = other_files(folder)
    for name in sorted(signed.keys() | found.keys()):
        if name not in found:
            raise RecordError(f"{folder / name}: missing")
        if name not in signed:
            raise RecordError(f"{folder / name}: was not there when the model was published")
        if signed[name] != found[name]:
            raise RecordError(f"{folder / name}: was changed after the model was published")
