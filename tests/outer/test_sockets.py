"""Congestion control of the exchange's connections, direct and through a tunnel."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dilocox.errors import ConfigError
from dilocox.outer import sockets
from dilocox.outer.groups import PeerGroup
from dilocox.outer.tunnel_carrier import Carrier
from tests.outer.sites import (
    TIMEOUTS,
    MemoryStore,
    authority_in,
    identity_of,
    run_each,
    shared_store,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="congestion control needs Linux")

PLAIN = "reno"
"""Every Linux has it, and allows it to everybody."""


def control_of(descriptor: int) -> str:
    with sockets._copied(descriptor) as found:
        option = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return option.rstrip(b"\0").decode()


def default() -> str:
    with socket.socket() as found:
        return control_of(found.fileno())


def test_what_the_system_has_may_be_chosen() -> None:
    sockets.check_congestion(None)
    sockets.check_congestion(PLAIN)
    with pytest.raises(ConfigError) as refused:
        sockets.check_congestion("swift")
    text = str(refused.value)
    assert text.startswith('network.congestion: "swift" cannot be used (')
    assert "this system has " in text
    assert PLAIN in text
    assert "\n" not in text


def test_a_default_that_leaves_lines_unused_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tcp_congestion_control"
    monkeypatch.setattr(sockets, "_DEFAULT", file)
    assert sockets.congestion_hint(4, None) is None  # not Linux
    file.write_text("bbr\n")
    told = sockets.congestion_hint(4, None)
    assert told is not None
    assert told.startswith("this machine's TCP is bbr")
    assert 'network.congestion = "cubic"' in told
    assert sockets.congestion_hint(2, None) is None
    assert sockets.congestion_hint(4, "bbr") is None  # as was asked for
    file.write_text("cubic\n")
    assert sockets.congestion_hint(4, None) is None


def test_connections_are_the_connected_ones_of_this_process() -> None:
    before = sockets.connections()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as idle:
        with socket.create_connection(listener.getsockname()) as near:
            far, _ = listener.accept()
            with far:
                assert sockets.connections() - before == {near.fileno(), far.fileno()}
                sockets.set_congestion_of([near.fileno(), 10_000], PLAIN)
                assert control_of(near.fileno()) == PLAIN
                assert control_of(far.fileno()) == default()
        assert idle.fileno() not in sockets.connections()


@pytest.mark.parametrize("chosen", [None, PLAIN])
def test_a_group_s_connections_get_it(chosen: str | None) -> None:
    def side(me: str, store: MemoryStore) -> Callable[[], list[str]]:
        def go() -> list[str]:
            before = sockets.connections()
            group = PeerGroup(
                store, "epoch/1/x", ["a", "b", "c"], me, "127.0.0.1", 20.0, 20.0, lambda: False,
                congestion=chosen,
            )  # fmt: skip
            found = sorted(control_of(each) for each in sockets.connections() - before)
            # One that ends now breaks the forming of those that are not as far.
            store.kv_set(f"formed/{me}", b"")
            store.kv_get([f"formed/{each}" for each in "abc"], 20.0)
            group.close()
            return found

        return go

    with shared_store() as store:
        results = run_each({me: side(me, store) for me in "abc"})
    expected = [chosen or default()] * 2
    assert results == dict.fromkeys("abc", expected), "one connection to each of two peers"


def test_a_tunnel_s_connections_get_it(tmp_path: Path) -> None:
    authority = authority_in(tmp_path)
    door = Carrier(identity_of(authority, "a"), TIMEOUTS, PLAIN)
    member = Carrier(identity_of(authority, "b"), TIMEOUTS, PLAIN)
    try:
        port = door.listen("127.0.0.1", 0)
        with socket.create_server(("127.0.0.2", 0)) as gloo:
            door.offer("1" * 32, gloo.getsockname()[1], ["b"])
            member.offer("a" * 32, 1, ["a"])
            before = sockets.connections()
            near = member.dial("a" * 32, "a", "127.0.0.1", port, "1" * 32, wait=5.0, limit=5.0)
            with socket.create_connection(("127.0.0.1", near)), gloo.accept()[0]:
                found = [control_of(each) for each in sockets.connections() - before]
        assert found.count(PLAIN) >= 2, "both ends between the sites"
        if default() != PLAIN:
            assert found.count(default()) >= 2, "the hops on this machine keep the machine's"
    finally:
        member.close()
        door.close()
