"""Congestion control of the exchange's connections."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from dilocox.errors import ConfigError
from dilocox.transport.link import tcp
from dilocox.transport.link.link import Link
from tests.support.linked import endpoint_of
from tests.support.thread_sites import until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="congestion control needs Linux"),
]

PLAIN = "reno"
"""Every Linux has it, and allows it to everybody."""


def control_of(connection: socket.socket) -> str:
    option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return option.rstrip(b"\0").decode()


def default() -> str:
    with socket.socket() as found:
        return control_of(found)


def test_what_the_system_has_may_be_chosen() -> None:
    tcp.check_congestion(None)
    tcp.check_congestion(PLAIN)
    with pytest.raises(ConfigError) as refused:
        tcp.check_congestion("swift")
    text = str(refused.value)
    assert text.startswith('network.congestion: "swift" cannot be used (')
    assert "this system has " in text
    assert PLAIN in text
    assert "\n" not in text


def test_a_default_that_leaves_lines_unused_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tcp_congestion_control"
    monkeypatch.setattr(tcp, "_DEFAULT", file)
    assert tcp.congestion_hint(4, None) is None  # not Linux
    file.write_text("bbr\n")
    told = tcp.congestion_hint(4, None)
    assert told is not None
    assert told.startswith("this machine's TCP congestion control is bbr")
    assert 'network.congestion = "cubic"' in told
    assert tcp.congestion_hint(2, None) is None
    assert tcp.congestion_hint(4, "bbr") is None  # as was asked for
    file.write_text("cubic\n")
    assert tcp.congestion_hint(4, None) is None


@pytest.mark.parametrize("chosen", [None, PLAIN])
def test_both_ends_of_a_link_get_it(chosen: str | None) -> None:
    door, member = (endpoint_of(site, congestion=chosen) for site in "ab")
    link = Link("epoch/1", "b", 20.0, 1.0)
    try:
        mine = door.announcement()
        door.offer(mine.route, {"b": link})
        stream = member.dial("a", mine)
        assert until(lambda: link.attached)
        for end in (stream, link._stream):
            assert end is not None
            assert control_of(end._socket) == (chosen or default())
        stream.close()
    finally:
        member.close()
        door.close()
