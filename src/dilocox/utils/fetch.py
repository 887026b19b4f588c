"""Reads a small public file from a path or a web address."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Protocol

import urllib3

from dilocox.errors import ConfigError
from dilocox.utils.http_proxy import pool_for
from dilocox.utils.secret_text import users_of

SECONDS = 20.0
"""Seconds for a connection, and for each answer of a server."""
WHOLE_SECONDS = 60.0
"""Seconds for the whole file, as a server may send it byte by byte."""


class Answer(Protocol):
    """A server's answer, of `http.client` or urllib3."""

    def read1(self, amt: int, /) -> bytes:
        """Return some bytes, at most `amt`; none at the end."""


def fetch(place: str, most: int) -> bytes:
    """Return the content of a file.

    Args:
        place: Path of a regular file, or URL of http or https. The environment may name a proxy.
        most: Bytes of the largest file that is read.

    Raises:
        ConfigError: The file cannot be read or is larger.
    """
    if place.lower().startswith(("http://", "https://")):
        if users_of(place):
            raise ConfigError("the URL holds a user or a password; leave it out")
        data = _download(place, most)
    else:
        try:
            data = _read(Path(place), most)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{place}: cannot be read ({reason})") from None
    if len(data) > most:
        raise ConfigError(f"{place}: is larger than {most:,} bytes: not the file that is asked for")
    return data


def _read(path: Path, most: int) -> bytes:
    # Without the flag, a named pipe that nobody writes to would not even be opened.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(most + 1)


def _download(url: str, most: int) -> bytes:
    try:
        with pool_for(url, retries=urllib3.Retry(3, backoff_factor=0.2)) as pool:
            answer = pool.request("GET", url, timeout=SECONDS, preload_content=False)
            if answer.status != 200:
                raise ConfigError(f"{url}: the server answers {answer.status} {answer.reason}")
            return read_in_time(answer, most, WHOLE_SECONDS)
    except TimeoutError:
        slow = f"not all of it in {WHOLE_SECONDS:.0f} s"
        raise ConfigError(f"{url}: cannot be read ({slow})") from None
    except urllib3.exceptions.HTTPError as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{url}: cannot be read ({reason})") from None


def read_in_time(answer: Answer, most: int, seconds: float) -> bytes:
    """Return at most `most` + 1 bytes of a server's answer, however slowly they arrive.

    Args:
        answer: The answer, of which nothing was read.
        most: Bytes of the largest answer that is of use.
        seconds: Time limit of all of it; `answer` has its own for each read.

    Raises:
        TimeoutError: They take longer.
    """
    data, end = bytearray(), time.monotonic() + seconds
    while len(data) <= most and (more := answer.read1(most + 1 - len(data))):
        data += more
        if time.monotonic() > end:
            raise TimeoutError("it answers too slowly")
    return bytes(data)
