"""The door of a rank: who is let in, and who is not."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dilocox.coordinator.identity import Authority
from dilocox.errors import ConfigError
from dilocox.transport.link import endpoint as link_endpoint
from dilocox.transport.link.addresses import Announcement
from dilocox.transport.link.endpoint import LinkEndpoint, check_ports, open_endpoint
from dilocox.transport.link.interfaces import interface_address
from dilocox.transport.link.link import Link, UnreachableError
from dilocox.transport.link.tls import UnauthenticatedPeerError, contexts, site_of
from dilocox.transport.link.transfer import Transfer
from dilocox.utils.unauthenticated import Strangers
from tests.support.linked import AUTHORITY, CLOSED_DOOR
from tests.support.thread_sites import TIMEOUTS, Keys, authority_in, identity_of, until

pytestmark = pytest.mark.waits

LIMIT = 60.0
ROUTE = "1" * 32


@pytest.fixture
def authority() -> Authority:
    return AUTHORITY


@pytest.fixture
def endpoints() -> Iterator[Callable[..., LinkEndpoint]]:
    """Endpoints in this process, closed in the end."""
    made: list[LinkEndpoint] = []
    before = set(threading.enumerate())

    def own() -> list[str]:
        begun = [thread.name for thread in threading.enumerate() if thread not in before]
        return [name for name in begun if name.startswith("links")]

    def make(site: str, of: Authority = AUTHORITY) -> LinkEndpoint:
        made.append(LinkEndpoint(identity_of(of, site), CLOSED_DOOR, "127.0.0.1", TIMEOUTS))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()
    assert until(lambda: not own()), own()


def offered(door: LinkEndpoint, site: str) -> Link:
    """A link that waits for `site`."""
    link = Link("epoch/1", site, 5.0, 0.5)
    door.offer(ROUTE, {site: link})
    return link


def dial(caller: LinkEndpoint, port: int, site: str, route: str = ROUTE) -> None:
    """Reach `site` behind a port; what it cannot, it raises."""
    caller.dial(site, Announcement("127.0.0.1", port, route, False)).close()


def refused(secure: ssl.SSLSocket) -> None:
    """Raise the error with which a door answers a stranger."""
    secure.sendall(b"1" * 32)
    if not secure.recv(1):
        raise ConnectionError("closed")


def test_members_of_a_group_are_let_in_and_nobody_else(
    endpoints: Callable[..., LinkEndpoint], caplog: pytest.LogCaptureFixture
) -> None:
    door, member, other = endpoints("a"), endpoints("b"), endpoints("c")
    link = offered(door, "b")
    dial(member, door.port, "a")
    assert until(lambda: link.attached)
    with pytest.raises(UnreachableError, match="its group is closed"):
        dial(other, door.port, "a")
    with pytest.raises(UnreachableError, match="its group is closed"):
        dial(member, door.port, "a", route="2" * 32)
    door.withdraw(ROUTE)
    with pytest.raises(UnreachableError, match="its group is closed") as found:
        dial(member, door.port, "a")
    assert found.value.gone
    assert "site c asks for a group that this rank does not have with it" in caplog.text


def test_the_wrong_site_at_an_address_is_refused(endpoints: Callable[..., LinkEndpoint]) -> None:
    door, member = endpoints("c"), endpoints("b")
    offered(door, "b")
    with pytest.raises(UnauthenticatedPeerError, match="site c answers at this address"):
        dial(member, door.port, "a")


def test_a_stranger_s_certificate_is_refused_and_logged(
    endpoints: Callable[..., LinkEndpoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    another_run = authority_in(tmp_path)
    door, stranger = endpoints("a"), endpoints("b", another_run)
    link = offered(door, "b")
    # The stranger notices first that it does not know the one that it called.
    with pytest.raises(UnauthenticatedPeerError, match="its certificate is not of this run"):
        dial(stranger, door.port, "a")
    # One that does not care is refused by TLS, before it can name a route.
    _, careless = contexts(identity_of(another_run, "b"))
    with socket.create_connection(("127.0.0.1", door.port), timeout=5.0) as plain:
        secure = careless.wrap_socket(plain)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            refused(secure)
    assert until(lambda: "unknown ca" in caplog.text or "verify failed" in caplog.text)
    assert "links: refused a connection from 127.0.0.1" in caplog.text
    assert not link.attached


def test_whoever_speaks_no_tls_or_shows_nothing_is_refused(
    endpoints: Callable[..., LinkEndpoint], caplog: pytest.LogCaptureFixture
) -> None:
    door = endpoints("a")
    with socket.create_connection(("127.0.0.1", door.port), timeout=5.0) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(4096)[:1] != b"H"
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.check_hostname, nameless.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", door.port), timeout=5.0) as plain:
        secure = nameless.wrap_socket(plain)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            refused(secure)
    assert until(lambda: caplog.text.count("links: refused a connection") == 2)


def test_an_older_tls_is_refused(endpoints: Callable[..., LinkEndpoint]) -> None:
    door = endpoints("a")
    _, older = contexts(identity_of(AUTHORITY, "b"))
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", door.port), timeout=5.0) as plain,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        older.wrap_socket(plain)


def test_silent_strangers_keep_no_member_out(
    endpoints: Callable[..., LinkEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    door, member = endpoints("a"), endpoints("b")
    monkeypatch.setattr(door, "_strangers", Strangers(8, 16, 0.0))
    offered(door, "b")
    with contextlib.ExitStack() as crowd:
        silent = []
        for tries in range(5):
            for _ in range(20):
                silent.append(socket.create_connection(("127.0.0.1", door.port), timeout=20.0))
                crowd.enter_context(silent[-1])
            dial(member, door.port, "a")
            assert silent[20 * tries].recv(1) == b"", "the oldest stranger went"
        assert until(lambda: len(door._open) <= 8 + 2)


def test_a_stranger_has_three_seconds_for_its_first_word(
    endpoints: Callable[..., LinkEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert link_endpoint.FIRST_WORD == 3.0
    monkeypatch.setattr(link_endpoint, "FIRST_WORD", 0.1)
    door = endpoints("a")
    with socket.create_connection(("127.0.0.1", door.port), timeout=5.0) as plain:
        assert plain.recv(1) == b""


def test_another_service_at_the_address_is_no_rank(endpoints: Callable[..., LinkEndpoint]) -> None:
    member = endpoints("b")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UnauthenticatedPeerError, match="no rank of this run answers"):
            dial(member, listener.getsockname()[1], "a")
        thread.join()


def test_a_link_that_a_member_fills_with_nonsense_ends(
    endpoints: Callable[..., LinkEndpoint],
) -> None:
    door, member = endpoints("a"), endpoints("b")
    link = offered(door, "b")
    stream = member.dial("a", Announcement("127.0.0.1", door.port, ROUTE, False))
    stream.send(b"\xff" * 25)
    assert until(lambda: link.failure is not None)
    assert link.failure == "a frame of kind 255; run the same dilocox version at all sites"
    stream.close()


def test_a_transfer_begins_before_its_first_record_is_whole(
    endpoints: Callable[..., LinkEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow line a record of 16 KiB takes long: that is the line's time, too."""
    door, member = endpoints("a"), endpoints("b")
    near, far = offered(door, "b"), Link("epoch/1", "a", 5.0, 0.5)
    stream = member.dial("a", Announcement("127.0.0.1", door.port, ROUTE, False))
    payload, rest = torch.arange(10_000).to(torch.uint8), threading.Event()
    line = stream._socket

    class Line:
        """Holds the last byte of the payload's record back."""

        def __getattr__(self, name: str) -> object:
            return getattr(line, name)

        def sendall(self, data: bytes) -> None:
            kept = 1 if len(data) > len(payload) else 0
            line.sendall(data[: len(data) - kept])
            if kept and rest.wait(LIMIT):
                line.sendall(data[-kept:])

    monkeypatch.setattr(stream, "_socket", Line())
    far.attach(stream)
    sends = Transfer("a", payload, "send", LIMIT)
    comes = Transfer("b", torch.zeros_like(payload), "receive", LIMIT)
    far.send(7, sends)
    near.receive(7, comes)
    assert until(lambda: comes.moves)
    assert comes.offset == 0
    rest.set()
    assert comes.poll(LIMIT)
    assert sends.poll(LIMIT)
    assert comes.posted <= comes.began <= comes.ended
    for link in (far, near):
        link.close()


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
        with pytest.raises(UnauthenticatedPeerError, match=why):
            site_of(shown, authority.pem, when)


def test_a_taken_port_is_named_with_the_mend() -> None:
    with socket.create_server(("127.0.0.11", 0)) as taken:
        port = taken.getsockname()[1]
        keys = Keys(ports=f"{port}-{port}")
        with pytest.raises(ConfigError) as caught:
            open_endpoint({"a": keys}, identity_of(AUTHORITY, "a"), 0, 1, "127.0.0.11", TIMEOUTS)
        # Before a rank is started, too.
        with pytest.raises(ConfigError, match=rf"cannot listen on port {port} of 127\.0\.0\.11"):
            check_ports("a", keys, 1, "127.0.0.11")
    assert str(caught.value) == (
        f"sites.a.ports: cannot listen on port {port} of 127.0.0.11 (Address already in use); "
        "choose other ports or another sites.a.interface, or end the process that uses the port"
    )
    check_ports("a", keys, 1, "127.0.0.11")
    check_ports("a", Keys(), 1, "none0")  # any port will do


def test_an_interface_has_an_address() -> None:
    assert interface_address("a", "lo") == "127.0.0.1"
    assert interface_address("a", "10.1.2.3") == "10.1.2.3"
    assert interface_address("a", "::1") == "::1"
    with pytest.raises(ConfigError, match=r'interface "none0" .*sites\.a\.interface'):
        interface_address("a", "none0")


def test_a_door_is_closed_while_a_thread_of_it_begins(
    endpoints: Callable[..., LinkEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    door, start = endpoints("paris"), threading.Thread.start
    wrong: list[BaseException] = []
    closers: list[threading.Thread] = []

    def close() -> None:
        try:
            door.close()
        except BaseException as error:
            wrong.append(error)

    def begun_late(thread: threading.Thread) -> None:
        if thread.name == "links-late" and not closers:
            closers.append(threading.Thread(target=close, name="closes"))
            start(closers[0])
            closers[0].join(0.5)  # the time in which the other thread may do something wrong
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begun_late)
    door._start(lambda: None, name="links-late")
    closers[0].join(LIMIT)
    assert wrong == []
