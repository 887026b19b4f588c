"""The coordinator's TCP and TLS listener, with limits on callers without a certificate.

asyncio's own servers hold a buffer of 256 KiB for every connection from its first moment. Without
a limit, idle connections would use up memory and file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dilocox.coordinator.server.background_tasks import say_if_it_dies
from dilocox.coordinator.server.member_connections import Members
from dilocox.utils.plain_text import plain
from dilocox.utils.unauthenticated import Strangers

HANDSHAKE_SECONDS = 10.0
FIRST_REQUEST_SECONDS = 15.0
"""Time limit in seconds from a stranger's handshake to the head of its request."""
_GOODBYE_SECONDS = 2.0
_LOOK = 0.25
_OUT_OF_FILES_PAUSE = 0.2
_log = logging.getLogger(__name__)


class Door:
    """Accepts connections for an aiohttp server, with limits on strangers and members.

    A stranger is a caller without a client certificate of this run. A stranger has a few seconds
    until its first request. If there are too many strangers, the oldest connection is closed
    (`Strangers`). If a site has too many connections, its oldest one is closed (`Members`).
    """

    def __init__(self, server: web.Server, context: ssl.SSLContext, ranks: int = 1) -> None:
        """`ranks`: number of ranks of every site, which sets the limit of its connections."""
        self._server, self._context = server, context
        self._members = Members(ranks)
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._strangers: Strangers[asyncio.Task[None]] = Strangers()
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: set[Any] = set()
        """Handlers of connections that have not sent a request yet."""
        self._unnamed: set[Any] = set()
        """Handlers of strangers that have completed the handshake."""

    async def listen(self, host: str, port: int) -> int:
        """Listen on all addresses of `host`. Returns the port; `port` 0 takes a free one.

        Raises `OSError` if an address cannot be used.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, where in dict.fromkeys(found):
            try:
                listener = socket.create_server(
                    (where[0], port or self._port), family=family, backlog=128
                )
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and self._listeners:
                    continue  # The name also stands for an address that this machine lacks.
                raise
            listener.setblocking(False)
            self._listeners.append(listener)
        self._accepting = [asyncio.create_task(self._accept(each)) for each in self._listeners]
        return self._port

    @property
    def _port(self) -> int:
        return int(self._listeners[0].getsockname()[1]) if self._listeners else 0

    def asked(self, handler: Any) -> None:
        """Note that a request has begun on the connection of `handler` (`web.Request.protocol`).

        From now on the limits of the request apply.
        """
        self._silent.discard(handler)

    def members(self) -> int:
        """Return the number of open connections of callers with a certificate."""
        return sum(handler not in self._unnamed for handler in self._server.connections)

    async def close(self) -> None:
        """Stop listening, and close strangers' connections."""
        tasks = [*self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, where = await loop.sock_accept(listener)
            except Exception as error:  # One failure must not stop the listener unnoticed.
                reason = getattr(error, "strerror", None) or repr(error)
                _log.warning("coordinator: a connection could not be accepted (%s)", reason)
                await asyncio.sleep(_OUT_OF_FILES_PAUSE)
                continue
            task = asyncio.create_task(self._let_in(connection))
            say_if_it_dies(task, "a new connection")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(self._strangers.discard)
            oldest = self._strangers.add(task, str(where[0]), loop.time())
            if oldest is not None:
                oldest.cancel()
            # Let other tasks run: a flood fills the queue as fast as it is emptied.
            await asyncio.sleep(0)

    async def _let_in(self, connection: socket.socket) -> None:
        """Do the TLS handshake on `connection`, and watch the connection while it is a stranger's.

        If this task is cancelled, the connection is closed.
        """
        loop = asyncio.get_running_loop()
        handler = self._server()
        self._silent.add(handler)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: handler,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=_GOODBYE_SECONDS,
            )
            if certificate := transport.get_extra_info("peercert"):
                self._members.add(certificate, transport)
                return
            end = loop.time() + FIRST_REQUEST_SECONDS
            self._unnamed.add(handler)
            try:
                while handler.transport is not None:
                    if handler in self._silent and loop.time() > end:
                        break
                    await asyncio.sleep(_LOOK)
            finally:
                if handler.transport is not None:
                    transport.abort()
        except OSError as error:  # This includes errors of TLS.
            _log.debug("coordinator: a caller went (%s)", error)
        finally:
            self._silent.discard(handler)
            self._unnamed.discard(handler)


def raise_open_files() -> None:
    """Raise this process's limit of open files to the hard limit, since connections are files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems report a hard limit that they do not grant.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class OneLineLog(logging.LoggerAdapter[logging.Logger]):
    """Logger for aiohttp's server that logs a malformed request in one line, without traceback."""

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        """Log a malformed request in one line, and other errors with their traceback."""
        error = options.get("exc_info")
        if isinstance(error, HttpProcessingError):
            said = plain(str(error))[:200]
            self.warning(f"{msg}: malformed request (%s)", *args, said)
        else:
            super().exception(msg, *args, **options)
