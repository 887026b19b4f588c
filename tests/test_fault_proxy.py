"""The proxy that stands before servers in tests lives longer than its connections."""

from __future__ import annotations

import socket
from contextlib import closing

from tests.support.fault_proxy import FaultProxy

PATIENCE = 10.0
"""Seconds within which a connection of this machine must answer."""


def test_a_server_that_is_not_there_does_not_end_the_proxy() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        port: int = gone.getsockname()[1]
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(FaultProxy(port)) as proxy,
    ):
        address = ("127.0.0.1", proxy.port)
        with socket.create_connection(address, PATIENCE) as client:
            assert client.recv(1) == b""
        proxy.lead_to(server.getsockname()[1])
        server.settimeout(PATIENCE)
        with socket.create_connection(address, PATIENCE) as client:
            client.sendall(b"?")
            answering, _ = server.accept()
            with answering:
                assert answering.recv(1) == b"?"
                answering.sendall(b"!")
                assert client.recv(1) == b"!"
