"""The coordinator's door: TCP and TLS, with limits on callers that show no certificate.

asyncio's own servers hold a buffer of 256 KiB for every connection from its first moment, and
without a limit on connections idle ones would use up memory and file descriptors.
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
"""From a stranger's handshake to the head of its request."""
_GOODBYE_SECONDS = 2.0
_LOOK = 0.25
_OUT_OF_FILES_PAUSE = 0.2
_log = logging.getLogger(__name__)


class Door:
    """Lets callers in to an aiohttp server: members as they come, strangers with limits.

    A stranger has no client certificate of this run. It has seconds to its first request, and when
    there are too many the oldest goes (`Strangers`); so it does of a member that has too many.
    """

    def __init__(self, server: web.Server, context: ssl.SSLContext, ranks: int = 1) -> None:
        """`ranks` of every site: each may have connections of its own."""
        self._server, self._context = server, context
        self._members = Members(ranks)
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._strangers: Strangers[asyncio.Task[None]] = Strangers()
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: set[Any] = set()
        """Handlers of strangers that have not asked for anything yet."""
        self._unnamed: set[Any] = set()
        """Handlers of strangers that are through the handshake."""

    async def listen(self, host: str, port: int) -> int:
        """Listen at all addresses of `host`; the port (0 takes a free one). Raises `OSError`."""
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
                    continue  # a name for an address that this machine has not
                raise
            listener.setblocking(False)
            self._listeners.append(listener)
        self._accepting = [asyncio.create_task(self._accept(each)) for each in self._listeners]
        return self._port

    @property
    def _port(self) -> int:
        return int(self._listeners[0].getsockname()[1]) if self._listeners else 0

    def asked(self, handler: Any) -> None:
        """A caller's request has begun (`web.Request.protocol`): the request has limits now."""
        self._silent.discard(handler)

    def members(self) -> int:
        """Open connections of callers that are no strangers."""
        return sum(handler not in self._unnamed for handler in self._server.connections)

    async def close(self) -> None:
        """Let nobody in any more, and close strangers' connections."""
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
            except Exception as error:  # a door that stays shut after one failure is seen by nobody
                reason = getattr(error, "strerror", None) or repr(error)
                _log.warning("coordinator: a connection could not be taken (%s)", reason)
                await asyncio.sleep(_OUT_OF_FILES_PAUSE)
                continue
            task = asyncio.create_task(self._let_in(connection))
            say_if_it_dies(task, "the door")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(self._strangers.discard)
            oldest = self._strangers.add(task, str(where[0]), loop.time())
            if oldest is not None:
                oldest.cancel()
            # Everybody else has a turn, too: a flood fills the queue as fast as it is emptied.
            await asyncio.sleep(0)

    async def _let_in(self, connection: socket.socket) -> None:
        """Make TLS on `connection`; while it is a stranger's, this stays. Cancelled, it closes."""
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
        except OSError as error:  # among them those of TLS
            _log.debug("coordinator: a caller went (%s)", error)
        finally:
            self._silent.discard(handler)
            self._unnamed.discard(handler)


def raise_open_files() -> None:
    """Allow this process as many open files as the system lets it: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems name a hard limit and refuse it.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class OneLineLog(logging.LoggerAdapter[logging.Logger]):
    """A logger for aiohttp's server: what a caller did wrong is one line, without a traceback."""

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        """Log a caller's malformed request in one line, other errors as they are."""
        error = options.get("exc_info")
        if isinstance(error, HttpProcessingError):
            said = plain(str(error))[:200]
            self.warning(f"{msg}: malformed request (%s)", *args, said)
        else:
            super().exception(msg, *args, **options)
