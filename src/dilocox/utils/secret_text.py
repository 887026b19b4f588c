"""Keeps secrets out of messages: passwords in URLs, join tokens, private keys, environment.

Errors of other libraries may repeat what they were given. `hide_secrets` is the last net below all
of them; code that knows a secret leaves it out by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

HIDDEN = "***"
_LEAST = 12
"""Characters of the shortest value that is a secret; shorter ones stand in other words, too."""
_NAMES = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_PIECE = re.compile(r"\S+?(?=[,;|][\w.+:-]{1,60}://|\s|\Z)")
"""A word, or the part of a word before the next URL of a list."""
_URL = re.compile(r"(['\"`]?)\b([\w.+:-]{1,60})://")
"""Quote before a URL, and its protocol, which may have others before it, as in `git+https`."""
_BEYOND = re.compile("[/?#]")
"""Libraries look for user and password before these, but a password may hold one, too."""
_PORT = re.compile(r"\d{1,5}")
_WEB = frozenset({"http", "https"})
_WITHOUT_PORTS = frozenset({"gcs", "gs", "oss", "s3", "s3a"})
"""Protocols whose URLs name a bucket in the place of a host, so a colon divides user and password.
"""
_ZEROG = "zerog"
"""Protocol whose URLs have a public root in the place of a user, also as `zerog+https`."""
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
    text = _PIECE.sub(lambda piece: _without_users(piece[0]), text)
    text = _TOKEN.sub(HIDDEN, text)
    return _PEM.sub(rf"\1{HIDDEN}", text)


def secret_problem(url: str) -> str | None:
    """Return why a URL must not be used or written down as it is, with the remedy; else None.

    Such a URL has a password in it, or, on the web, a user or a query, which may be keys.
    """
    kept = (
        "leave it out, and give it to the storage's own library by its configuration file or "
        "environment"
    )
    users = users_of(url)
    try:
        parts = urlsplit(url)
    except ValueError:  # such as for a bracket in a password
        parts = urlsplit("")
    if parts.password is not None or any(":" in user for user in users):
        return f"the URL holds a password; {kept}"
    if users or (parts.scheme in _WEB and parts.query):
        what = "a user" if users else "a query"
        return f"the URL holds {what}, which may be a key; {kept}"
    return None


def users_of(text: str) -> list[str]:
    """Return the user of each URL in a text without white space, as `user:password`.

    A user without a password counts on the web only, where it may be a key. A password may hold any
    character: it ends at the last `@` of the URL.
    """
    return [text[start:end] for start, end in _users(text)]


def _without_users(piece: str) -> str:
    shown, done = "", 0
    for start, end in _users(piece):
        shown, done = shown + piece[done:start] + HIDDEN, end
    return shown + piece[done:]


def _users(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each URL's user and password in a text without white space."""
    done = 0
    for url in _URL.finditer(text) if "@" in text else ():
        if url.start() < done:
            continue
        quote, begin = url[1], url.end()
        protocols = re.split("[+:]", url[2].lower())
        scheme = _ZEROG if _ZEROG in protocols else protocols[-1]
        stop = text.find(quote, begin) if quote else -1
        end = _user_end(scheme, text, begin, len(text) if stop < 0 else stop)
        if end > begin:
            done = end
            yield begin, end


def _user_end(scheme: str, text: str, begin: int, stop: int) -> int:
    """Return where the `@` after a URL's user and password is; less than `begin` without them.

    Args:
        scheme: Protocol of the URL, in lower case.
        text: A text with the URL.
        begin: Where the characters after `://` begin.
        stop: Where the URL ends at the latest.
    """
    beyond = _BEYOND.search(text, begin, stop)
    host = text[begin : stop if beyond is None else beyond.start()]
    name, colon, more = host.partition("@")[0].partition(":")
    if colon and "@" not in host and scheme not in _WITHOUT_PORTS:
        colon = "" if _PORT.fullmatch(more) or name.startswith("[") else colon
    if colon:
        return text.rfind("@", begin, stop)
    return begin + host.rfind("@") if scheme in _WEB else -1
