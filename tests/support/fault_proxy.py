"""A TCP proxy before a server that can be dead, silent or dishonest."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal

Mode = Literal["pass", "dead", "silent", "wrong"]
LARGE = 8000
"""Bytes: with `wrong`, the last byte of every larger piece of an answer is changed."""


class FaultProxy:
    """Listens on a port of this machine, and passes connections on to another port."""

    def __init__(self, port: int) -> None:
        """`port`: where the server listens on 127.0.0.1."""
        self.server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._mode: Mode = "pass"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        """Held while connections are opened or closed: none is opened in a mode that has ended."""
        threading.Thread(target=self._accept, daemon=True).start()

    def become(self, mode: Mode) -> None:
        """Close all connections, and treat new ones in another way."""
        with self._lock:
            self._mode = mode
            self._hang_up()

    def lead_to(self, port: int) -> None:
        """Close all connections, and pass new ones on to another port."""
        with self._lock:
            self.server = port
            self._hang_up()

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._take(client)

    def _take(self, client: socket.socket) -> None:
        """Treat a new connection as the mode says. A server that is not there closes it."""
        if self._mode == "dead":
            client.close()
            return
        self._open.append(client)
        if self._mode == "silent":
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.server))
        except OSError:
            client.close()
            return
        self._open.append(server)
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for ends in ((client, server), (server, client)):
            threading.Thread(target=self._pass, args=(*ends, server), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._mode == "wrong" and source is server and len(data) > LARGE:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
