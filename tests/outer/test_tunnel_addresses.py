"""The tunnel's pure half: run-file keys, announcements, and Gloo's address blobs."""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.errors import ConfigError, ExchangeError
from dilocox.outer.tunnel_addresses import (
    CONNECT_HOST,
    GLOO_HOST,
    WAIT_HOST,
    Announcement,
    announce,
    blob_address,
    check_sites,
    connects,
    door_of,
    is_announcement,
    parse_advertise,
    parse_ports,
    read_announcement,
    wanted,
    with_address,
)


@dataclass(frozen=True)
class Keys:
    """[sites.NAME] of a run file."""

    advertise: str | None = None
    ports: str | None = None


ports = st.integers(1, 65535)
hosts = st.integers(0, 2**32 - 1).map(lambda number: str(ipaddress.IPv4Address(number)))
announcements = st.builds(
    Announcement,
    host=st.from_regex(r"[a-z0-9.:-]{1,40}", fullmatch=True),
    port=ports,
    route=st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    chosen=st.booleans(),
)


@st.composite
def blobs(draw: st.DrawFn) -> tuple[bytes, str, int]:
    """A blob as Gloo writes it, with the address in it."""
    name = draw(st.binary(max_size=64))
    host, port = draw(hosts), draw(ports)
    storage = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    rest = draw(st.binary(min_size=120, max_size=120))
    ids = draw(st.lists(st.integers(0, 2**62), max_size=5))
    blob = struct.pack("=Q", len(name)) + name + struct.pack("=Q", 136) + storage + rest
    return blob + struct.pack("=q", -1) + b"".join(struct.pack("=q", i) for i in ids), host, port


@given(blobs(), hosts, ports)
def test_an_address_is_read_and_replaced_and_nothing_else_changes(
    made: tuple[bytes, str, int], host: str, port: int
) -> None:
    blob, there, its_port = made
    assert blob_address(blob) == (there, its_port)
    changed = with_address(blob, host, port)
    assert blob_address(changed) == (host, port)
    assert len(changed) == len(blob)
    assert with_address(changed, there, its_port) == blob


@given(st.binary(max_size=400))
def test_bytes_that_are_no_blob_are_refused(value: bytes) -> None:
    with pytest.raises(ExchangeError, match="another layout"):
        blob_address(value)


@given(blobs(), st.integers(1, 7))
def test_a_cut_blob_is_refused(made: tuple[bytes, str, int], missing: int) -> None:
    with pytest.raises(ExchangeError, match="another layout"):
        with_address(made[0][:-missing], "127.0.0.1", 1)


def test_an_ipv6_blob_is_refused() -> None:
    blob = bytearray(struct.pack("=QQH", 0, 136, socket.AF_INET6) + bytes(134))
    with pytest.raises(ExchangeError, match="another layout"):
        blob_address(bytes(blob))


@given(announcements, st.binary(max_size=200))
def test_an_announcement_is_read_as_it_was_made(made: Announcement, blob: bytes) -> None:
    value = announce(made, blob)
    assert is_announcement(value)
    assert read_announcement(value) == (made, blob)


@given(announcements, st.binary(max_size=64), st.integers(0, 200), st.integers(0, 255))
def test_a_changed_announcement_is_refused_or_within_range(
    made: Announcement, blob: bytes, where: int, what: int
) -> None:
    value = bytearray(announce(made, blob))
    value[where % len(value)] = what
    try:
        found, _ = read_announcement(bytes(value))
    except ExchangeError:
        return
    assert found.host
    assert 1 <= found.port <= 65535
    assert len(found.route) == 32


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"dilocox-tunnel 1 ",
        b"dilocox-tunnel 1 []\n",
        b"dilocox-tunnel 1 {}\n",
        b'dilocox-tunnel 1 {"host": "a", "port": true, "route": "00", "chosen": 1}\n',
        b"dilocox-tunnel 1 " + b"[" * 3 + b"\n",
        b'dilocox-tunnel 2 {"host": "a"}\n',
    ],
)
def test_a_malformed_announcement_is_refused(head: bytes) -> None:
    with pytest.raises(ExchangeError, match="cannot be read"):
        read_announcement(head)


@given(announcements, announcements, st.integers(0, 9), st.integers(0, 9))
def test_exactly_one_side_of_a_pair_connects(
    one: Announcement, other: Announcement, index: int, its_index: int
) -> None:
    if index == its_index:
        its_index += 1
    first = connects(one, index, other, its_index)
    assert first != connects(other, its_index, one, index)
    if one.chosen != other.chosen:
        assert first == other.chosen


def test_gloo_sees_who_it_connects_to_below_itself() -> None:
    lower, own, higher = (socket.inet_aton(h) for h in (CONNECT_HOST, GLOO_HOST, WAIT_HOST))
    assert lower < own < higher


@given(ports, st.integers(0, 64), st.integers(1, 64))
def test_a_range_gives_one_port_to_each_rank(first: int, more: int, ranks: int) -> None:
    last = min(65535, first + more)
    text = f"{first}-{last}"
    if last - first + 1 < ranks:
        with pytest.raises(ConfigError, match=f"give at least {ranks}"):
            parse_ports("lyon", text, ranks)
    else:
        found = parse_ports("lyon", text, ranks)
        assert (found[0], found[-1]) == (first, last)
        doors = [door_of("lyon", Keys(None, text), n, ranks).bind_port for n in range(ranks)]
        assert doors == list(range(first, first + ranks))


def test_a_range_that_is_too_small_says_so() -> None:
    with pytest.raises(ConfigError) as caught:
        check_sites({"kyiv": Keys(), "lyon": Keys(ports="29500-29501")}, ranks=4)
    assert str(caught.value) == "sites.lyon.ports: 2 ports for 4 ranks; give at least 4"


@given(st.text(max_size=12))
def test_any_text_is_a_range_or_a_config_error(text: str) -> None:
    try:
        found = parse_ports("lyon", text, 1)
    except ConfigError:
        return
    assert 1 <= found[0] <= found[-1] <= 65535


@pytest.mark.parametrize(
    "text", ["", "1", "1-", "0-5", "9-8", "1-65536", "\u0661-\u0662", "-1-5", "1-2-3"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sites\.lyon\.ports"):
        parse_ports("lyon", text, 1)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("203.0.113.7", "203.0.113.7", None),
        ("203.0.113.7:40000", "203.0.113.7", 40000),
        ("gate.example.org", "gate.example.org", None),
        ("gate.example.org:1", "gate.example.org", 1),
        ("2001:db8::7", "2001:db8::7", None),
        ("[2001:db8::7]", "2001:db8::7", None),
        ("[2001:db8::7]:40000", "2001:db8::7", 40000),
    ],
)
def test_an_advertised_address_is_read(text: str, host: str, port: int | None) -> None:
    assert parse_advertise("lyon", text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", ":1", "a b", "host:0", "host:65536", "host:x", "[::1", "a:b:c"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sites\.lyon\.advertise"):
        parse_advertise("lyon", text)


def test_outside_ports_run_along_with_the_inside_ones() -> None:
    keys = Keys("gate.example.org:40000", "29500-29503")
    doors = [door_of("lyon", keys, number, 4) for number in range(4)]
    assert [door.bind_port for door in doors] == [29500, 29501, 29502, 29503]
    assert [door.port for door in doors] == [40000, 40001, 40002, 40003]
    with pytest.raises(ConfigError, match=r"set sites\.lyon\.ports"):
        door_of("lyon", Keys("gate.example.org:40000"), 0, 4)
    with pytest.raises(ConfigError, match="beyond 65535"):
        door_of("lyon", Keys("gate.example.org:65534", "1-4"), 0, 4)


def test_a_tunnel_is_wanted_by_any_site_of_the_run() -> None:
    assert not wanted({"a": Keys(), "b": Keys()})
    assert wanted({"a": Keys(), "b": Keys(advertise="203.0.113.7")})
    assert wanted({"a": Keys(ports="1-2"), "b": Keys()})
    assert not door_of("a", Keys(), 0, 1).chosen
