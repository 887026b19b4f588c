"""The carrier of a tunnel: who is let in, who is not, and what becomes of the bytes."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dilocox.errors import ConfigError
from dilocox.outer import tunnel_carrier
from dilocox.outer.coordinator.identity import Authority
from dilocox.outer.coordinator.strangers import Strangers
from dilocox.outer.tunnel_carrier import Carrier, UnreachableError
from dilocox.outer.tunnel_relay import BUFFER_BYTES, relay
from dilocox.outer.tunnel_tls import StrangerError, contexts, site_of
from tests.outer.sites import TIMEOUTS, authority_in, identity_of, until

LIMIT = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority_in(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def carriers(authority: Authority) -> Iterator[Callable[..., Carrier]]:
    """Carriers in this process, closed in the end."""
    made: list[Carrier] = []

    def make(site: str, of: Authority = authority) -> Carrier:
        made.append(Carrier(identity_of(of, site), TIMEOUTS))
        return made[-1]

    yield make
    for carrier in made:
        carrier.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("tunnel")]


def dial(carrier: Carrier, port: int, site: str, route: str = "1" * 32) -> int:
    """Reach `site` behind a port."""
    carrier.offer("a" * 32, 1, [site])
    return carrier.dial("a" * 32, site, "127.0.0.1", port, route, wait=5.0, limit=5.0)


def refused(secure: ssl.SSLSocket) -> None:
    """Raise the error with which a door answers a stranger."""
    secure.sendall(b"1" * 32)
    if not secure.recv(1):
        raise ConnectionError("closed")


def test_a_carrier_leads_members_to_gloo_and_nobody_else(
    carriers: Callable[..., Carrier], caplog: pytest.LogCaptureFixture
) -> None:
    door, member, other = carriers("a"), carriers("b"), carriers("c")
    port = door.listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.2", 0)) as gloo:
        door.offer("1" * 32, gloo.getsockname()[1], ["b"])
        with socket.create_connection(("127.0.0.1", dial(member, port, "a"))) as near:
            far, _ = gloo.accept()
            with far:
                near.sendall(b"there")
                assert far.recv(100) == b"there"
                far.sendall(b"and back")
                assert near.recv(100) == b"and back"
        with pytest.raises(UnreachableError, match="its group is closed"):
            dial(other, port, "a")
        with pytest.raises(UnreachableError, match="its group is closed"):
            dial(member, port, "a", route="2" * 32)
        door.withdraw("1" * 32)
        with pytest.raises(UnreachableError, match="its group is closed"):
            dial(member, port, "a")
    assert "site c asks for a group that is not here or not its own" in caplog.text


def test_the_wrong_site_at_an_address_is_refused(carriers: Callable[..., Carrier]) -> None:
    door, member = carriers("c"), carriers("b")
    port = door.listen("127.0.0.1", 0)
    door.offer("1" * 32, 1, ["b"])
    with pytest.raises(StrangerError, match="site c answers there"):
        dial(member, port, "a")


def test_a_stranger_s_certificate_is_refused_and_logged(
    carriers: Callable[..., Carrier], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    another_run = authority_in(tmp_path)
    door, stranger = carriers("a"), carriers("b", another_run)
    port = door.listen("127.0.0.1", 0)
    door.offer("1" * 32, 1, ["b"])
    # The stranger notices first that it does not know the one that it called.
    with pytest.raises(StrangerError, match="its certificate is not of this run"):
        dial(stranger, port, "a")
    # One that does not care is refused by TLS, before it can name a route.
    _, careless = contexts(identity_of(another_run, "b"))
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as plain:
        secure = careless.wrap_socket(plain)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            refused(secure)
    assert until(lambda: "unknown ca" in caplog.text or "verify failed" in caplog.text)
    assert "tunnel: refused a connection from 127.0.0.1" in caplog.text


def test_whoever_speaks_no_tls_or_shows_nothing_is_refused(
    carriers: Callable[..., Carrier], caplog: pytest.LogCaptureFixture
) -> None:
    door = carriers("a")
    port = door.listen("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(4096)[:1] != b"H"
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.check_hostname, nameless.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as plain:
        secure = nameless.wrap_socket(plain)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            refused(secure)
    assert until(lambda: caplog.text.count("tunnel: refused a connection") == 2)


def test_silent_strangers_keep_no_member_out(
    carriers: Callable[..., Carrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    door, member = carriers("a"), carriers("b")
    monkeypatch.setattr(door, "_strangers", Strangers(8, 16, 0.0))
    port = door.listen("127.0.0.1", 0)
    with contextlib.ExitStack() as crowd, socket.create_server(("127.0.0.2", 0)) as gloo:
        door.offer("1" * 32, gloo.getsockname()[1], ["b"])
        silent = []
        for tries in range(5):
            for _ in range(20):
                silent.append(socket.create_connection(("127.0.0.1", port), timeout=20.0))
                crowd.enter_context(silent[-1])
            with socket.create_connection(("127.0.0.1", dial(member, port, "a"))):
                far, _ = gloo.accept()
                far.close()
            assert silent[20 * tries].recv(1) == b"", "the oldest stranger went"
        assert until(lambda: door.connections() <= 8 + 2)


def test_a_stranger_has_three_seconds_for_its_first_word(
    carriers: Callable[..., Carrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tunnel_carrier.FIRST_WORD == 3.0
    monkeypatch.setattr(tunnel_carrier, "FIRST_WORD", 0.1)
    door = carriers("a")
    port = door.listen("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as plain:
        assert plain.recv(1) == b""


def test_another_service_at_the_address_is_no_tunnel(carriers: Callable[..., Carrier]) -> None:
    member = carriers("b")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StrangerError, match="no tunnel of this run answers"):
            dial(member, listener.getsockname()[1], "a")
        thread.join()


def test_close_ends_connections_that_are_carried(carriers: Callable[..., Carrier]) -> None:
    door, member = carriers("a"), carriers("b")
    port = door.listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.2", 0)) as gloo:
        door.offer("1" * 32, gloo.getsockname()[1], ["b"])
        near_port, unused = dial(member, port, "a"), dial(member, port, "a")
        with socket.create_connection(("127.0.0.1", near_port)) as near:
            far, _ = gloo.accept()
            assert (door.connections(), member.connections()) == (2, 2)
            door.close()
            assert far.recv(1) == b""
            far.close()
            assert near.recv(1) == b""
    member.close()
    assert member.connections() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", unused))


def test_close_lets_out_what_gloo_has_handed_over(carriers: Callable[..., Carrier]) -> None:
    door, member = carriers("a"), carriers("b")
    port = door.listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.2", 0)) as gloo:
        door.offer("1" * 32, gloo.getsockname()[1], ["b"])
        near = socket.create_connection(("127.0.0.1", dial(member, port, "a")))
        far, _ = gloo.accept()
        # A connection that no thread has taken up yet is cut, as Gloo's own would be: not this one.
        near.sendall(b"!")
        assert far.recv(1) == b"!"
        last = os.urandom(200_000)  # fits into the buffers on the way: nobody reads yet
        near.sendall(last)
        closing = threading.Thread(target=member.close)
        closing.start()
        with near, far:
            assert _all_of(far) == last
        closing.join(LIMIT)
        assert not closing.is_alive()


def test_certificates_that_are_no_site_s_are_refused(authority: Authority) -> None:
    now = datetime.datetime.now(datetime.UTC)

    def der(pem: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE") :])

    good = der(identity_of(authority, "a").certificate)
    assert site_of(good, authority.pem, now) == "a"
    server = der(authority.certificate_path.read_text())
    for shown, when, why in [
        (None, now, "no certificate"),
        (good, now + datetime.timedelta(days=900), "expired"),
        (good, now - datetime.timedelta(days=900), "expired"),
        (server, now, "not a site's"),
        (der(authority.pem), now, "not of this run"),
        (good[:-1] + bytes([good[-1] ^ 1]), now, "not of this run"),
        (b"\x30\x00", now, "not of this run"),
    ]:
        with pytest.raises(StrangerError, match=why):
            site_of(shown, authority.pem, when)


def test_a_taken_port_is_named_with_the_mend(authority: Authority) -> None:
    with socket.create_server(("127.0.0.11", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            Carrier(identity_of(authority, "a"), TIMEOUTS).listen("127.0.0.11", port)
    assert str(caught.value) == (
        f"sites.a.ports: port {port} on 127.0.0.11 cannot be listened at (Address already in "
        "use); choose other ports or another sites.a.interface, or end what holds the port"
    )


def test_each_direction_ends_by_itself(authority: Authority) -> None:
    """What was sent before an end arrives, and the other direction goes on."""
    server, client = contexts(identity_of(authority, "a"))
    near, near_plain = socket.socketpair()
    far, far_plain = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        taken, _ = listener.accept()

    def listen() -> None:
        relay(far_plain, server.wrap_socket(taken, server_side=True))

    threads = [threading.Thread(target=listen)]
    threads[0].start()
    secure = client.wrap_socket(dialled)
    threads.append(threading.Thread(target=relay, args=(near_plain, secure)))
    threads[1].start()
    question = os.urandom(5 * BUFFER_BYTES + 17)
    answer = os.urandom(7 * BUFFER_BYTES + 3)

    def ask() -> None:
        near.sendall(question)
        near.shutdown(socket.SHUT_WR)

    threads.append(threading.Thread(target=ask))
    threads[2].start()
    with near, far:
        assert _all_of(far) == question

        def reply() -> None:
            far.sendall(answer)
            far.shutdown(socket.SHUT_WR)

        # Only now does the answer begin: the end of the question has not cut it off.
        threads.append(threading.Thread(target=reply))
        threads[3].start()
        assert _all_of(near) == answer
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
    assert near_plain.fileno() == far_plain.fileno() == secure.fileno() == -1


def _all_of(source: socket.socket) -> bytes:
    parts = []
    while part := source.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
