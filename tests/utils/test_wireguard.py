"""WireGuard configurations: keys by the standard's vectors, and files that fit together."""

from __future__ import annotations

import base64
import itertools
import re
from pathlib import Path

import pytest

from dilocox.errors import ConfigError
from dilocox.utils.wireguard import (
    configuration,
    parse_endpoints,
    peers_of,
    public_of,
    subnet_of,
    write,
)

pytestmark = pytest.mark.waits

SITES = ["paris", "lyon", "oslo"]
ENDPOINTS = {"paris": "198.51.100.4:4500", "lyon": "2001:db8::7"}


def test_public_keys_are_those_of_rfc_7748() -> None:
    """Section 6.1: the keys of Alice and Bob."""
    for private, public in (
        (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
        ),
        (
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
            "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
        ),
    ):
        assert public_of(bytes.fromhex(private)).hex() == public


def sections(text: str) -> list[dict[str, str]]:
    """Key and value of every section, in order."""
    found: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith("["):
            found.append({"": line})
        elif line and not line.startswith("#"):
            key, value = line.split(" = ")
            found[-1][key] = value
    return found


def test_every_site_knows_every_other(tmp_path: Path) -> None:
    places = write(tmp_path / "vpn", "demo", SITES, ENDPOINTS)
    assert [place.relative_to(tmp_path).as_posix() for place in places] == [
        "vpn/paris/dilocox0.conf", "vpn/lyon/dilocox0.conf", "vpn/oslo/dilocox0.conf",
    ]  # fmt: skip
    assert all(place.stat().st_mode & 0o077 == 0 for place in places)
    own, others = {}, {}
    for site, place in zip(SITES, places, strict=True):
        interface, *peers = sections(place.read_text())
        assert interface[""] == "[Interface]"
        own[site] = interface
        others[site] = peers
    for site, peers in others.items():
        for other, peer in zip([name for name in SITES if name != site], peers, strict=True):
            key = public_of(base64.b64decode(own[other]["PrivateKey"]))
            assert base64.b64decode(peer["PublicKey"]) == key
            assert peer["AllowedIPs"] == own[other]["Address"].replace("/24", "/32")
            wanted = {"paris": "198.51.100.4:4500", "lyon": "[2001:db8::7]:51820"}.get(other)
            assert peer.get("Endpoint") == wanted
    assert [own[site]["ListenPort"] for site in SITES] == ["4500", "51820", "51820"]
    addresses = {own[site]["Address"] for site in SITES}
    assert len(addresses) == 3
    assert all(re.fullmatch(r"10\.\d+\.\d+\.[123]/24", address) for address in addresses)
    # Keys that may be in use are not replaced.
    before = places[0].read_text()
    with pytest.raises(ConfigError, match="there already, and its key may be in use"):
        write(tmp_path / "vpn", "demo", SITES, ENDPOINTS)
    assert places[0].read_text() == before


def test_keys_are_new_each_time_and_nobody_gets_anothers() -> None:
    peers = [*peers_of("demo", SITES, ENDPOINTS), *peers_of("demo", SITES, ENDPOINTS)]
    assert len({peer.private for peer in peers}) == 6
    for me, other in itertools.permutations(peers[:3], 2):
        assert other.private not in configuration(me, peers[:3])


def test_runs_have_networks_of_their_own() -> None:
    assert len({subnet_of(f"run-{number}") for number in range(100)}) > 90
    assert subnet_of("demo") == subnet_of("demo")


@pytest.mark.parametrize(
    ("endpoints", "said"),
    [
        ({"rome": "h"}, "--endpoint rome: not in the run file, which names: paris, lyon, oslo"),
        ({"paris": "h"}, "sites lyon and oslo: neither has an --endpoint"),
        ({"paris": "h:0", "lyon": "h"}, "--endpoint paris=h:0: '0' is no port"),
        ({"paris": "h:x", "lyon": "h"}, "'x' is no port"),
    ],
)
def test_what_cannot_work_is_refused(endpoints: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        peers_of("demo", SITES, endpoints)


def test_endpoints_are_name_and_host() -> None:
    assert parse_endpoints(["paris=h:1", "lyon=[::1]:2"]) == {"paris": "h:1", "lyon": "[::1]:2"}
    for wrong in ("paris", "=h", "paris="):
        with pytest.raises(ConfigError, match="write it as NAME=HOST"):
            parse_endpoints([wrong])
