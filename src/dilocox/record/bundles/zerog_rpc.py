"""JSON-RPC over HTTP to a server that may be dead, slow or dishonest.

Every answer has limits in bytes and in time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import urllib3

from dilocox.errors import RecordError
from dilocox.record.bundles.place import AT_ONCE, SLOWEST, patiently
from dilocox.utils.http_proxy import pool_for
from dilocox.utils.plain_text import plain

SMALL = 1 << 20
"""Limit in bytes of answers without data."""
_BUSY = "too many data"
"""Part of a storage node's message that it takes no more at this moment."""

T = TypeVar("T")


class RefusedCallError(RecordError):
    """The server has answered a call with an error."""


class JsonRpc:
    """A server of JSON-RPC."""

    def __init__(self, name: str, url: str, patience: float, seconds: float) -> None:
        """Nothing is asked yet.

        Args:
            name: The server, for messages.
            url: URL of its JSON-RPC.
            patience: Seconds for which a failing call is repeated.
            seconds: Time limit of one call, beside the time for its bytes.
        """
        self.name = name
        self._url, self._patience, self._seconds = url, patience, seconds
        self._pool = pool_for(url, maxsize=AT_ONCE, retries=False)

    def call(
        self, method: str, params: list[Any], parse: Callable[[Any], T], done: str, what: str,
        answer: int = SMALL,
    ) -> T:  # fmt: skip
        """Call a method and return its parsed result.

        Args:
            method: The method.
            params: Its parameters.
            parse: Parses the result; raises `KeyError`, `TypeError` or `ValueError` for another
                form.
            done: What the call does, such as "read", for messages.
            what: What it is done to, for messages.
            answer: Limit in bytes of the answer.

        Raises:
            RefusedCallError: The server answers with an error.
            RecordError: The server fails.
        """
        body = request(method, json.dumps(params).encode())
        return self.post(body, parse, done, what, answer, lambda message: True)

    def post(
        self, body: bytes, parse: Callable[[Any], T], done: str, what: str, answer: int,
        refused: Callable[[str], bool],
    ) -> T:  # fmt: skip
        """Send a request and return its parsed result; see `call`.

        `body`: the request. `refused`: whether an error's message is a refusal; if it is none, the
        result is None.
        """

        def once() -> T:
            said = json.loads(self._exchange(body, answer))
            message = message_of(said)
            if message is not None:
                if _BUSY in message:
                    raise OSError(message)
                if refused(message):
                    raise RefusedCallError(
                        f"{self.name}/{what}: the node refuses: {plain(message)}"
                    )
                return parse(None)
            try:
                return parse(said["result"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"an answer of another form: {error}") from None

        limit = self._seconds + (len(body) + answer) / SLOWEST
        return patiently(once, f"{self.name}/{what}", done, limit, self._patience)

    def _exchange(self, body: bytes, most: int) -> bytes:
        """Post a request; return at most `most` bytes. Raises `OSError` and `ValueError`."""
        try:
            response = self._pool.request(
                "POST", self._url, body=body, headers={"Content-Type": "application/json"},
                preload_content=False, redirect=False, timeout=self._seconds,
            )  # fmt: skip
            data = response.read(most + 1)
        except urllib3.exceptions.HTTPError as error:
            raise OSError(_told(error)) from None
        if len(data) > most:
            response.close()
            raise ValueError(f"an answer of more than {most:,} bytes")
        response.release_conn()
        if response.status != 200:
            raise OSError(f"HTTP status {response.status}")
        return data


def request(method: str, params: bytes) -> bytes:
    """Return the body of a request. `params`: its parameters, JSON."""
    return b'{"jsonrpc":"2.0","id":1,"method":"%b","params":%b}' % (method.encode(), params)


def message_of(said: Any) -> str | None:
    """Return the text of an error; None if the answer is none."""
    if not isinstance(said, dict) or said.get("error") is None:
        return None
    error = said["error"]
    parts = (error.get("message"), error.get("data")) if isinstance(error, dict) else (error,)
    return "; ".join(str(each)[:150] for each in parts if each)


def _told(error: Exception) -> str:
    """Return the reason of a failed connection without the objects that urllib3 names."""
    reason = error.__cause__ or error.__context__
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return str(error.args[-1])
    return re.sub(r"<[^>]*>:? ?|\w+\(host='[^']*', port=\d+\): ?", "", str(error))
