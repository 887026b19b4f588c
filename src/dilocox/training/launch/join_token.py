"""Reads the join token from a file, the environment or the terminal.

The token is never taken from the command line, which every user of the machine can read.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dilocox.errors import JoinError

VARIABLE = "DILOCOX_TOKEN"
"""Environment variable that holds the join token."""


def read_token(
    file: Path | None,
    environment: Mapping[str, str] | None = None,
    ask: Callable[[str], str] | None = None,
) -> str:
    """Return the join token from `file`, else from the environment, else from the terminal.

    `environment`: None means the process's environment. `ask` shows a prompt and returns the typed
    text without showing it; None means `getpass`, if there is a terminal. Raises `JoinError` if
    there is no token or the file cannot be read. The error never shows a token.
    """
    if file is not None:
        if str(file).startswith("dilocox1-"):
            raise JoinError(
                "token: must not be on the command line, since every user of this machine can read "
                f"it; write the token to a file for --token-file, or set {VARIABLE}"
            )
        try:
            return file.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text"
            raise JoinError(
                f"token file {file}: cannot be read ({reason}); copy "
                "RUN_FOLDER/coordinator/tokens/SITE from the coordinator's machine"
            ) from None
    said = (os.environ if environment is None else environment).get(VARIABLE)
    if said is not None:
        return said.strip()
    if ask is None and sys.stdin.isatty():
        ask = getpass.getpass
    if ask is None:
        raise JoinError(
            "token: missing; give --token-file FILE (a copy of RUN_FOLDER/coordinator/tokens/SITE)"
            f", set {VARIABLE}, or start this at a terminal and paste it"
        )
    return ask("join token: ").strip()
