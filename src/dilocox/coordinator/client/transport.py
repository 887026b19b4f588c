"""Calls to the coordinator with retries, over persistent TLS connections."""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import urllib3
from pydantic import ValidationError
from urllib3.util import SKIP_HEADER

from dilocox.coordinator.client.addresses import AddressPool
from dilocox.coordinator.client.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    EpochOverError,
    SiteGoneError,
    StakeUnknownError,
)
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol import body_coding
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.calls import Call, Reply
from dilocox.coordinator.protocol.round_plan import Message
from dilocox.coordinator.protocol.standby_messages import POSITION, SEEN, Position
from dilocox.errors import (
    DilocoxError,
    JoinError,
    RetryLaterError,
    RunEndedError,
    RunStoppedError,
)
from dilocox.utils.backoff import backoff_delays

_HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": SKIP_HEADER,
    "Accept-Encoding": SKIP_HEADER,
}
"""Headers of all requests. Those of `urllib3` that no coordinator reads are left out: a slow link
carries some ten requests per round."""
BUSY = 429
"""HTTP status of a refusal after which the caller may retry (too many requests)."""


class Transport:
    """Makes calls over a connection pool, with retries. Thread-safe."""

    def __init__(
        self,
        pool: AddressPool,
        *,
        request: float,
        away: float,
        pause: float,
        compress: bool = False,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Use the connections of `pool`.

        Args:
            pool: Connections to the coordinator.
            request: Seconds for one request, its wait at the server not counted.
            away: Seconds for which connection errors are retried.
            pause: Longest pause between two attempts, in seconds.
            compress: Compress bodies; the coordinator takes this from members alone.
            now: Monotonic clock, in seconds.
            sleep: Waits for a number of seconds.
        """
        self._pool, self._request, self._away, self._pause = pool, request, away, pause
        self._now, self._sleep = now, sleep
        self._compress = compress
        self._closed = threading.Event()
        self._seen = Position()
        """Newest position of the coordinator's log that a reply has named."""

    def close(self) -> None:
        """Refuse further calls and retries, and close idle connections."""
        self._closed.set()
        self._pool.close()

    def send(self, call: Call[Reply], limit: float | None = None) -> Reply:
        """Send a request and return the coordinator's reply.

        Args:
            call: The request. The time for which the server may hold it comes on top of the limit.
            limit: Seconds for one attempt, instead of the usual limit.

        Raises:
            CoordinatorUnreachableError: No answer within the time for retries.
            DilocoxError: The error that the refusal means, for example `SiteGoneError`,
                `JoinError` or `CoordinatorError`.
        """
        content, headers = None, dict(_HEADERS)
        if isinstance(call, Message):
            content = call.model_dump_json().encode()
            if self._compress:
                content = body_coding.compressed(content)
                headers["Content-Encoding"] = body_coding.ENCODING
        name, wait = call.target, call.server_wait
        end = self._now() + wait + self._away
        waits = backoff_delays(self._pause / 20, self._pause)
        request = self._request if limit is None else limit
        while True:
            if self._closed.is_set():
                raise CoordinatorError(f"{name}: this client is closed")
            try:
                answer = self._pool.urlopen(
                    call.method,
                    f"/v1/{name}",
                    body=content,
                    headers={**headers, SEEN: self._seen.text},
                    timeout=urllib3.Timeout(connect=request, read=wait + request),
                    retries=False,
                )
            except (urllib3.exceptions.HTTPError, OSError) as error:
                cause: BaseException = error
                if isinstance(error, urllib3.exceptions.SSLError) and "ingerprint" in str(error):
                    raise CoordinatorError(
                        f"coordinator {self._where}: its certificate is not the one of this run; "
                        "use the join line that this run's coordinator printed"
                    ) from None
            else:
                if self._is_older(answer):
                    # Another coordinator has taken over, and this one does not know it yet.
                    self._pool.turn()
                    cause = CoordinatorError("an earlier coordinator answers")
                elif answer.status < 400:
                    return _parse(call.reply(), answer.data, name)
                # These statuses come from a server that is closing or from a proxy; BUSY means that
                # this site asks too often.
                elif answer.status not in (BUSY, 502, 503, 504):
                    raise _refusal(answer.status, answer.data, name)
                else:
                    cause = CoordinatorError(f"status {answer.status}")
            pause = next(waits)
            if self._now() + pause >= end:
                raise CoordinatorUnreachableError(
                    f"coordinator {self._where}: no answer for {self._away:g} s "
                    f"({_short(cause)}); is it running, and does the network reach it?"
                ) from None
            self._sleep(pause)

    def _is_older(self, answer: urllib3.BaseHTTPResponse) -> bool:
        """Return whether a reply is of an earlier generation than one before; note its position."""
        position = Position.parse(answer.headers.get(POSITION))
        if not position.generation:
            return False  # a proxy, or an older dilocox
        if position.generation < self._seen.generation:
            return True
        self._seen = max(self._seen, position)
        return False

    @property
    def _where(self) -> str:
        return self._pool.where


def pool_of_site(url: str, identity: Identity, connections: int) -> AddressPool:
    """Return connections that prove `identity` and accept only the run's own coordinator."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.authority)
    # The ssl module reads certificates and keys from files only; mkstemp makes them mode 0600.
    descriptor, path = tempfile.mkstemp(suffix=".pem")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(identity.key + identity.certificate)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)
    # The certificate is pinned, so the host name is not checked: a coordinator may have any.
    return AddressPool(
        [
            urllib3.HTTPSConnectionPool(
                *address,
                maxsize=connections,
                ssl_context=context,
                assert_fingerprint=identity.fingerprint,
                assert_hostname=False,
                retries=False,
            )
            for address in addresses_of(url)
        ]
    )


def pool_of_stranger(url: str, fingerprint: str) -> AddressPool:
    """Return a connection without an identity to the server with this certificate fingerprint."""
    return AddressPool(
        [
            urllib3.HTTPSConnectionPool(
                *address,
                maxsize=1,
                cert_reqs="CERT_NONE",
                ssl_minimum_version=ssl.TLSVersion.TLSv1_3,
                assert_fingerprint=fingerprint,
                assert_hostname=False,
                retries=False,
            )
            for address in addresses_of(url)
        ]
    )


def addresses_of(url: str) -> list[tuple[str, int]]:
    """Return the (host, port) of each address of `url`, which commas separate.

    Raises `JoinError` for what is not an address.
    """
    return [host_and_port(each.strip()) for each in url.split(",")]


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of `https://HOST:PORT` or `HOST:PORT`. Raises `JoinError` otherwise."""
    try:
        parts = urlsplit(url if "//" in url else f"https://{url}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "https" or not parts.hostname or port is None:
        raise JoinError(f"coordinator {url!r}: not an address; write it as HOST:PORT")
    return parts.hostname, port


def _parse(reply: type[Reply], content: bytes, name: str) -> Reply:
    try:
        return reply.model_validate_json(content)
    except ValidationError as error:
        raise CoordinatorError(
            f"{name}: the coordinator's answer cannot be read "
            f"({error.errors()[0]['msg']}); run the same dilocox version on both sides"
        ) from None


def _refusal(status: int, content: bytes, name: str) -> DilocoxError:
    try:
        refusal = m.Refusal.model_validate_json(content)
    except ValidationError:
        return CoordinatorError(
            f"{name}: refused with status {status}, not by a dilocox coordinator; check the address"
        )
    kinds: dict[str, type[DilocoxError]] = {
        "gone": SiteGoneError,
        "join": JoinError,
        "taken": RetryLaterError,
        "stake": StakeUnknownError,
        "ended": RunEndedError,
        "stopped": RunStoppedError,
        "over": EpochOverError,
    }
    return kinds.get(refusal.kind, CoordinatorError)(refusal.error)


def _short(error: BaseException) -> str:
    text = str(error).split(": ", 1)[-1].strip()
    return (text or type(error).__name__)[:200]
