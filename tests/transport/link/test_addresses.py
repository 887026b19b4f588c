"""Where a rank is reached: run-file keys and announcements."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.errors import ConfigError, ExchangeError
from dilocox.transport.link.addresses import (
    Announcement,
    announce,
    connects,
    door_of,
    parse_advertise,
    parse_ports,
    read_announcement,
)

pytestmark = pytest.mark.waits


@dataclass(frozen=True)
class Keys:
    """[sites.NAME] of a run file."""

    advertise: str | None = None
    ports: str | None = None


ports = st.integers(1, 65535)
announcements = st.builds(
    Announcement,
    host=st.from_regex(r"[a-z0-9.:-]{1,40}", fullmatch=True),
    port=ports,
    route=st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    chosen=st.booleans(),
)


@given(announcements)
def test_an_announcement_is_read_as_it_was_made(made: Announcement) -> None:
    assert read_announcement(announce(made)) == made


@given(announcements, st.integers(0, 200), st.integers(0, 255))
def test_a_changed_announcement_is_refused_or_within_range(
    made: Announcement, where: int, what: int
) -> None:
    value = bytearray(announce(made))
    value[where % len(value)] = what
    try:
        found = read_announcement(bytes(value))
    except ExchangeError:
        return
    assert found.host
    assert 1 <= found.port <= 65535
    assert len(found.route) == 32


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"dilocox-link 1 ",
        b"dilocox-link 1 []\n",
        b"dilocox-link 1 {}\n",
        b'dilocox-link 1 {"host": "a", "port": true, "route": "00", "chosen": 1}\n',
        b"dilocox-link 1 " + b"[" * 3 + b"\n",
        b'dilocox-link 2 {"host": "a"}\n',
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
        door_of("lyon", Keys(ports="29500-29501"), 0, 4)
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


def test_a_site_without_keys_has_chosen_no_way_in() -> None:
    assert not door_of("a", Keys(), 0, 1).chosen
    assert door_of("a", Keys(ports="1-2"), 0, 1).chosen
    assert door_of("a", Keys(advertise="203.0.113.7"), 0, 1).chosen
