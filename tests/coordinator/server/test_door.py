"""Strangers at the coordinator: many, silent, slow and malformed; members do not notice."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dilocox.coordinator.client.transport import pool_of_stranger
from dilocox.coordinator.server import door, member_connections, request_body
from dilocox.utils import unauthenticated
from dilocox.utils.unauthenticated import Strangers
from tests.support.served_run import Run

pytestmark = pytest.mark.waits


def until(fact: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not fact() and time.monotonic() < end:
        time.sleep(0.01)
    return fact()


def secure(run: Run) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(("127.0.0.1", run.port), timeout=20.0))


def whole(caller: socket.socket) -> bytes:
    """All that the server says until it closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := caller.recv(10_000):
            said += more
    return said


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def idle() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for item in opened:
        item.close()


def test_a_thousand_idle_connections_are_few(
    run: Run, idle: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.server._door, "_strangers", Strangers(8, 16, 0.01))
    run.enrol("a")
    member = run.client("a")
    member.beat(0, 0, 0)
    before = open_files()
    for number in range(200):
        idle.append(socket.create_connection(("127.0.0.1", run.port), timeout=20.0))
        if number % 50 == 0:
            member.beat(0, 0, 0)
    # Both ends of every connection are in this process.
    assert until(lambda: open_files() - before - 200 <= 16)
    # Who comes now is let in, and the member's connection is the same as before.
    run.enrol("b")
    member.beat(0, 0, 0)
    assert member._transport._pool._pools[0].num_connections == 1
    # The oldest were closed, the newest are there.
    idle[0].settimeout(20.0)
    assert idle[0].recv(1) == b""


def test_a_member_s_idle_connections_take_no_other_member_s_files(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of its own go, and whoever had that connects again."""
    monkeypatch.setattr(member_connections, "FEW", 2)
    monkeypatch.setattr(member_connections, "OF_A_RANK", 1)
    kept = member_connections.Members(1)
    assert run.server._door is not None
    monkeypatch.setattr(run.server._door, "_members", kept)
    run.enrol("b")
    other = run.client("b")
    assert other.status().sequence
    run.enrol("a")
    clients = [run.client("a") for _ in range(6)]
    for client in clients:
        assert client.status().sequence

    def open_of(site: str) -> int:
        return sum(not each.is_closing() for each in kept._open[site])

    assert until(lambda: open_of("a") == 3)
    assert open_of("b") == 1
    assert clients[0].status().sequence
    assert other.status().sequence


def test_silence_has_an_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as soon:  # the others' handshakes have the time that they need
        soon.setattr(door, "HANDSHAKE_SECONDS", 0.2)
        with socket.create_connection(("127.0.0.1", run.port), timeout=20.0) as plain:
            assert plain.recv(1) == b""
    monkeypatch.setattr(door, "FIRST_REQUEST_SECONDS", 0.2)
    with secure(run) as caller, contextlib.suppress(ConnectionResetError):
        assert caller.recv(1) == b""
    # Who is slower than that may find the door closed already.
    with secure(run) as caller, contextlib.suppress(ConnectionError, ssl.SSLEOFError):
        caller.sendall(b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\n")
        assert caller.recv(1) == b""


def test_a_body_has_its_time_and_a_stranger_one_request(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "STRANGER_BODY_SECONDS", 0.2)
    with secure(run) as caller:
        caller.sendall(b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        said = whole(caller)
        assert said.startswith(b"HTTP/1.1 400")
        assert b"no whole body within 0.2 s" in said
    with secure(run) as caller:
        ask = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"
        caller.sendall(ask)
        said = whole(caller)
        assert said.startswith(b"HTTP/1.1 403")
        assert said.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("encoding", ["deflate", "gzip", "br"])
def test_a_body_that_cannot_be_unpacked_is_malformed(run: Run, encoding: str) -> None:
    pool = pool_of_stranger(run.url, run.core.authority.fingerprint)
    headers = {"Content-Encoding": encoding}
    answer = pool.urlopen("POST", "/v1/enrol", body=b"rubbish", headers=headers)
    assert answer.status == 400
    assert json.loads(answer.data)["kind"] == "malformed"
    pool.close()


def test_a_malformed_request_is_one_line_of_the_log(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), secure(run) as caller:
        caller.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nBad\x1b[2J header\r\n\r\n")
        assert caller.recv(10_000).startswith(b"HTTP/1.")
    records = [item for item in caplog.records if item.levelno >= logging.WARNING]
    assert len(records) == 1
    assert records[0].exc_info is None
    assert "malformed request" in records[0].getMessage()
    assert "\n" not in records[0].getMessage()
    assert "\x1b" not in records[0].getMessage()


def test_the_coordinator_takes_all_the_files_that_it_may_open() -> None:
    code = (
        "import resource as r; from dilocox.coordinator.server.door import raise_open_files\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n"
        "raise_open_files(); print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert done.stdout.split() == [str(hard), str(hard)]


# --- who goes ---


def come(crowd: Strangers[Any], *who: tuple[str, str, float]) -> list[str | None]:
    return [crowd.add(name, address, at) for name, address, at in who]


def test_newcomers_come_in_and_the_oldest_goes() -> None:
    crowd: Strangers[Any] = Strangers(2, 8, 1.0)
    assert come(crowd, ("a", "1.1.1.1", 0.0), ("b", "1.1.1.1", 0.0), ("c", "1.1.1.1", 5.0)) == [
        None, None, "a",
    ]  # fmt: skip
    crowd.discard("b")
    assert come(crowd, ("d", "1.1.1.1", 9.0)) == [None]
    assert len(crowd) == 2


def test_all_ranks_of_a_run_may_come_at_once_up_to_a_limit() -> None:
    crowd: Strangers[Any] = Strangers(2, 4, 1.0)
    ranks = [(str(number), "1.1.1.1", 0.0) for number in range(6)]
    assert come(crowd, *ranks) == [None, None, None, None, "0", "1"]


@pytest.mark.parametrize("same", [("9.9.9.9", "9.9.9.9"), ("2001:db8::1", "2001:db8::ffff:2")])
def test_the_network_with_the_most_strangers_loses_one(same: tuple[str, str]) -> None:
    crowd: Strangers[Any] = Strangers(3, 8, 1.0)
    come(crowd, ("first", "1.1.1.1", 0.0), ("x", same[0], 1.0), ("y", same[1], 2.0))
    assert come(crowd, ("z", same[0], 9.0)) == ["x"]


def test_the_limits_leave_room_under_the_usual_limit_on_files() -> None:
    assert unauthenticated.AT_ONCE <= unauthenticated.BURST <= 256
