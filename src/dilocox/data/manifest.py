"""The manifest of token files: their content, their sources, and digests over both.

`manifest.json` has five parts:

- `format`: version of the layout.
- `content`: everything that is the same on every machine for the same corpus.
- `digest`: the SHA-256 over the canonical JSON of `content`.
- `made_with`: options and versions of the machine that made the files.
- `checksum`: the SHA-256 over the other four parts, so that every change is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilocox.errors import DataError
from dilocox.utils.storage import sha256_of

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the layout of token files without flags."""

FORMAT_WITH_FLAGS = 2
"""Version of the layout of token files with flags: shards have a second file (`data.flags`)."""

FORMAT_WITH_PARTS = 3
"""Version of the layout of token files of several sources, with or without flags: each split is in
parts, one per source (`data.parts`)."""


FORMAT_WITH_COLUMNS = 4
"""Version of the layout of token files with flags and columns (`data.columns`), of one source or of
several: shards have one more file per column."""


def canonical(content: Any) -> bytes:
    """Returns `content` as canonical JSON: sorted keys, no spaces, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(content: Any) -> str:
    """Returns the SHA-256 (hex) over the canonical JSON of `content`."""
    return hashlib.sha256(canonical(content)).hexdigest()


def format_of(content: dict[str, Any]) -> int:
    """Returns the version of the layout of token files whose manifest has `content`."""
    if column_names(content):
        return FORMAT_WITH_COLUMNS
    if "mixture" in content:
        return FORMAT_WITH_PARTS
    return FORMAT_WITH_FLAGS if has_flags(content) else FORMAT


def has_flags(content: dict[str, Any]) -> bool:
    """Returns whether token files whose manifest has `content` have flags."""
    splits = content.get("splits", {}).values()
    return any("flags" in shard for split in splits for shard in split.get("shards", ()))


def column_names(content: dict[str, Any]) -> list[str]:
    """Returns the sorted names of the columns of token files whose manifest has `content`."""
    splits = content.get("splits", {}).values()
    shards = [shard for split in splits for shard in split.get("shards", ())]
    return sorted({name for shard in shards for name in shard.get("columns", ())})


def held_out_whole(content: dict[str, Any]) -> list[bool]:
    """Returns, for each source of the manifest, whether all of the source's text is held out."""
    count = len(content["sources"])
    found = [number >= content.get("validation_from", count) for number in range(count)]
    first = 0
    for each in content.get("mixture", ()):
        for number in range(each["sources"]):
            found[first + number] = number >= each["trained"]
        first += each["sources"]
    return found


def render(content: dict[str, Any], made_with: dict[str, Any]) -> str:
    """Returns the text of `manifest.json`."""
    manifest: dict[str, Any] = {
        "format": format_of(content),
        "digest": digest_of(content),
        "content": content,
        "made_with": made_with,
    }
    manifest["checksum"] = digest_of(manifest)
    return json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n"


def write_manifest(folder: Path, content: dict[str, Any], made_with: dict[str, Any]) -> None:
    """Write the manifest into `folder` and flush it to disk.

    Raises `OSError` if it cannot be written or exists already.
    """
    with (folder / MANIFEST).open("x", encoding="utf-8") as stream:
        stream.write(render(content, made_with))
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of `folder` and check its format, digest and checksum.

    Raises `DataError` if the manifest is missing, unreadable, of another format, or changed.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except FileNotFoundError:
        raise DataError(
            f"{folder}: no token files here (no {MANIFEST}); run: dilocox data prepare"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the data again") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise DataError(f"{path}: not a manifest of token files; name another folder")
    if manifest["format"] not in range(FORMAT, FORMAT_WITH_COLUMNS + 1):
        raise DataError(
            f"{path}: format {manifest['format']!r}, this version of dilocox reads {FORMAT} to "
            f"{FORMAT_WITH_COLUMNS}; prepare the data again in another folder"
        )
    content, made_with = manifest.get("content"), manifest.get("made_with")
    if (
        not isinstance(content, dict)
        or not isinstance(made_with, dict)
        or text != render(content, made_with)
    ):
        raise DataError(f"{path}: changed since it was written; prepare the data again")
    return manifest


def hash_file(path: Path) -> str:
    """Returns the SHA-256 (hex) of a file. Raises `DataError` if it cannot be read."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def source_names(options: Mapping[str, Any]) -> list[str]:
    """Returns the names of all sources in the manifest's order.

    Names of `source` come first, then names of `validation_source`. With several sources, the two
    kinds of each source stand together. `options` holds keys of `[data]`.
    """
    names: list[str] = []
    for each in options.get("sources") or ():
        names += source_names(each)
    for key in ("source", "validation_source"):
        given = options.get(key)
        names += given if isinstance(given, list) else [given] if given else []
    return names
