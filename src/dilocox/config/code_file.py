"""The file with the user's own functions (`site.code`): its bytes and their SHA-256.

Nothing here runs the file. `dilocox.training.code_file` does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from dilocox.errors import ConfigError

LARGEST = 2**20
"""Most bytes of the file."""


def read_code(path: str, asked: str = "site.code") -> bytes:
    """Return the bytes of the file `path`. `asked`: the key or option that names the file.

    Raises `ConfigError` if there is no such file, or the file is larger than `LARGEST`.
    """
    file = Path(path).expanduser()
    try:
        if not file.is_file():
            raise ConfigError(
                f"{asked} {path}: no such file on this machine; copy it here from another site, "
                "or write its path here"
            )
        with file.open("rb") as opened:
            content = opened.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{asked} {path}: cannot be read ({error.strerror})") from None
    if len(content) > LARGEST:
        raise ConfigError(
            f"{asked} {path}: is larger than {LARGEST} bytes; name a Python file, and leave data "
            "in files of their own"
        )
    return content


def evaluation_task(path: str) -> str:
    """Return the task of `evaluation.tasks` that the function `evaluation` of the file becomes."""
    return f"{Path(path).expanduser().resolve()}:evaluation"


def digest_of_code(content: bytes) -> str:
    """Return the SHA-256, hex, of the file's bytes: what `sha256sum` prints."""
    return hashlib.sha256(content).hexdigest()


def agree_on_code(raw: dict[str, Any], where: str) -> None:
    """Set a missing `run.code` to the digest of the file that `site.code` names.

    All sites must agree on `run.code`, so they agree on the file. `raw`: a run file's tables.
    Raises `ConfigError`, which begins with `where`, if the file cannot be read.
    """
    site, run = raw.get("site"), raw.get("run", {})
    # Values of a wrong type are left to the validation.
    if not isinstance(site, dict) or not isinstance(run, dict) or run.get("code"):
        return
    path = site.get("code")
    if isinstance(path, str) and path:
        found = read_code(path, f"{where}: site.code")
        raw["run"] = {**run, "code": digest_of_code(found)}
