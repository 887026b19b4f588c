"""Runs a file of the user's own functions, if it is the file on which all sites agreed."""

from __future__ import annotations

import sys
import traceback
import types
from pathlib import Path

from dilocox.config.code_file import digest_of_code, read_code
from dilocox.errors import ConfigError
from dilocox.training.tasks.own_function import importing
from dilocox.utils.formatting import reason_of

MODULE = "dilocox_site_code"
"""Name of the module that the file becomes."""


def run_agreed(path: str, agreed: str, asked: str) -> types.ModuleType:
    """Run the file `path` as a module, and return the module.

    Args:
        path: a Python file on this machine.
        agreed: SHA-256 of the file on which all sites agreed (`run.code`).
        asked: the key or option that names the file.

    Raises:
        ConfigError: there is no such file, it has another digest, or it fails when it is run.
    """
    content, file = read_code(path, asked), Path(path).expanduser().resolve()
    check_digest(path, digest_of_code(content), agreed, asked)
    return _run(file, content, f"{asked} {path}")


def check_digest(path: str, digest: str, agreed: str, asked: str) -> None:
    """Raise `ConfigError` if `digest` is not the SHA-256 on which the sites agreed."""
    if digest == agreed:
        return
    if not agreed:
        raise ConfigError(
            f"{asked} {path}: the run file has no run.code, so the sites agreed on no functions; "
            "leave the file out"
        )
    raise ConfigError(
        f"{asked} {path}: its SHA-256 is {digest[:12]}…, the sites agreed on {agreed[:12]}… "
        "(run.code); copy the file from another site"
    )


def _run(file: Path, content: bytes, where: str) -> types.ModuleType:
    """Run the bytes `content` of `file` as a module, and return the module."""
    module = types.ModuleType(MODULE)
    module.__file__ = str(file)
    before = sys.modules.get(MODULE)
    sys.modules[MODULE] = module
    if str(file.parent) not in sys.path:
        # At the end: a file beside the user's must not hide a package of the same name.
        sys.path.append(str(file.parent))
    try:
        with importing():
            # The bytes that were digested, not those that a second look at the file would find.
            exec(compile(content, str(file), "exec"), module.__dict__)  # noqa: S102
    except BaseException as error:  # code of the user's may raise anything, SystemExit too
        sys.modules.pop(MODULE)
        if before is not None:
            sys.modules[MODULE] = before
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = [
            f", line {each.lineno}"
            for each in traceback.extract_tb(error.__traceback__)
            if each.filename == str(file)
        ]
        at = lines[-1] if lines else ""
        raise ConfigError(f"{where}: cannot be run ({reason_of(error)}{at})") from error
    return module
