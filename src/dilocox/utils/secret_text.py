"""Keeps secrets out of messages: passwords in URLs, join tokens, private keys, environment.

Errors of other libraries may repeat what they were given. `hide_secrets` is the last net below all
of them; code that knows a secret leaves it out by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

HIDDEN = "***"
_LEAST = 12
"""Characters of the shortest value that is a secret; shorter ones stand in other words, too."""
_NAMES = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_USER = re.compile(r"(\w+://)[^/\s@'\"]*:[^/\s@'\"]*@")
_TOKEN = re.compile(r"\bdilocox1-[0-9a-f]{64}-[0-9a-f]{32}")
_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL)


def hide_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` with `HIDDEN` in place of each secret that can be recognised.

    Args:
        text: A message, of one line or several.
        environment: Variables whose values are secret if their names say so (KEY, TOKEN, SECRET,
            PASSWORD, CREDENTIAL), paths excepted; None: those of this process.
    """
    known = os.environ if environment is None else environment
    values = {value.strip() for name, value in known.items() if _NAMES.search(name)}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _LEAST and not os.path.isabs(value):
            text = text.replace(value, HIDDEN)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    text = _TOKEN.sub(HIDDEN, text)
    return _PEM.sub(rf"\1{HIDDEN}", text)


def secret_problem(url: str) -> str | None:
    """Return why a URL must not be used or written down as it is, with the remedy; else None.

    Such a URL has a password in it, or, on the web, a user or a query, which may be keys.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return None  # it is no URL, which whoever opens it says
    kept = (
        "leave it out, and give it to the storage's own library by its configuration file or "
        "environment"
    )
    if parts.password is not None:
        return f"the URL holds a password; {kept}"
    if parts.scheme in ("http", "https") and (parts.username or parts.query):
        what = "a user" if parts.username else "a query"
        return f"the URL holds {what}, which may be a key; {kept}"
    return None
