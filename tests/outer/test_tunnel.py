"""Tunnels between sites as real processes and real sockets."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import pytest
import torch

from dilocox.errors import ConfigError
from dilocox.outer.coordinator.identity import Authority, Identity
from dilocox.outer.groups import EpochChangedError, PeerGroup
from dilocox.outer.tunnel import (
    Passage,
    Tunnel,
    check_ports,
    form_group,
    interface_address,
    open_tunnel,
)
from dilocox.outer.tunnel_addresses import Announcement, announce
from dilocox.outer.tunnel_carrier import Carrier, UnreachableError
from tests.outer.sites import (
    CONTEXT,
    TIMEOUTS,
    Keys,
    MemoryStore,
    authority_in,
    identity_of,
    run_each,
    shared_store,
    until,
)

ADDRESSES = {"a": "127.0.0.11", "b": "127.0.0.12", "c": "127.0.0.13"}
LIMIT = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority_in(tmp_path_factory.mktemp("authority"))


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])


def pattern(sender: str, receiver: str, size: int) -> torch.Tensor:
    """Bytes that no other pair sends."""
    seed = ord(sender) * 256 + ord(receiver)
    values = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed))
    return values.to(torch.uint8)


def swap(group: PeerGroup, me: str, size: int, tag: int) -> bool:
    """Everybody sends to everybody; whether all that came is what was sent."""
    others = [site for site in group.sites if site != me]
    arrived = {site: torch.zeros(size, dtype=torch.uint8) for site in others}
    transfers = [group.receive(tensor, site, tag) for site, tensor in arrived.items()]
    transfers += [group.send(pattern(me, site, size), site, tag) for site in others]
    done = all(transfer.poll(LIMIT) for transfer in transfers)
    return done and all(torch.equal(arrived[s], pattern(s, me, size)) for s in others)


def form(tunnel: Tunnel | None, store: MemoryStore, name: str, sites: Sequence[str]) -> PeerGroup:
    """A group as a rank forms it."""
    assert tunnel is not None
    return tunnel.group(store, name, sites, LIMIT, LIMIT, lambda: False)


def open_here(keys: Mapping[str, Keys], identity: Identity) -> Tunnel | None:
    """The tunnel of the only rank of a site."""
    return open_tunnel(keys, identity, 0, 1, ADDRESSES[identity.site], TIMEOUTS)


def epochs(keys: Mapping[str, Keys], store: MemoryStore, identity: Identity) -> dict[str, object]:
    """A site's part in two groups at a time, then in a third one."""
    me, sites = identity.site, list(keys)
    before = threading.active_count()
    tunnel = open_here(keys, identity)
    assert tunnel is not None
    groups = [form(tunnel, store, f"epoch/{n}/0/0", sites) for n in (1, 2)]
    same = [swap(group, me, 3_000_001, tag=5) for group in groups for _ in range(2)]
    carried = tunnel.connections()
    store.kv_set(f"counted/{me}", b"")
    store.kv_get([f"counted/{site}" for site in sites], LIMIT)
    for group in groups:
        group.close()
    del group, groups
    ended = until(lambda: tunnel.connections() == 0)
    third = form(tunnel, store, "epoch/3/0/0", sites[::-1])
    same.append(swap(third, me, 1, tag=1))
    del third  # without close, as after an entry
    ended &= until(lambda: tunnel.connections() == 0)
    tunnel.close()
    left = until(lambda: threading.active_count() == before)
    socket.create_server((tunnel.host, tunnel.port)).close()  # the port is free again
    return {"same": same, "carried": carried, "ended": ended, "left": left}


@pytest.mark.parametrize("sites", ["ab", "abc"])
def test_groups_run_through_tunnels_one_after_the_other_and_two_at_a_time(
    authority: Authority, sites: str
) -> None:
    # One site with a port, one that others reach by name and port, one with nothing.
    every = {
        "a": Keys(ports=(lambda p: f"{p}-{p}")(free_port(ADDRESSES["a"]))),
        "b": Keys(advertise=ADDRESSES["b"]),
        "c": Keys(),
    }
    keys = {site: every[site] for site in sites}
    with shared_store() as store:
        results = run_each(
            {s: partial(epochs, keys, store, identity_of(authority, s)) for s in sites}
        )
    for site in sites:
        assert results[site] == {
            "same": [True] * 5,
            "carried": 2 * (len(sites) - 1),
            "ended": True,
            "left": True,
        }


def test_gloo_listens_on_loopback_only_and_nothing_goes_in_the_clear(
    authority: Authority,
) -> None:
    keys = {"a": Keys(advertise=ADDRESSES["a"]), "b": Keys()}
    secret = bytes(range(65, 91)) * 400

    def through_a_tap(store: MemoryStore, identity: Identity) -> list[bytes]:
        """Site b reaches a over a tap that keeps what passes."""
        tunnel = open_here(keys, identity)
        assert tunnel is not None
        passed: list[bytes] = []
        tap = socket.create_server((ADDRESSES["c"], 0))
        if identity.site == "a":
            threading.Thread(
                target=_tap, args=(tap, (tunnel.host, tunnel.port), passed), daemon=True
            ).start()
            tunnel.host, tunnel.port = tap.getsockname()
        group = form(tunnel, store, "epoch/1/0/0", ["a", "b"])
        data = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        if identity.site == "a":
            group.send(data, "b", 1).poll(LIMIT)
        else:
            arrived = torch.zeros(len(secret), dtype=torch.uint8)
            group.receive(arrived, "a", 1).poll(LIMIT)
            passed.append(arrived.numpy().tobytes())
        swap(group, identity.site, 10, 2)
        return [b"".join(passed)]

    with shared_store() as store:
        results = run_each(
            {s: partial(through_a_tap, store, identity_of(authority, s)) for s in "ab"}
        )
    assert results["b"] == [secret]
    assert len(results["a"][0]) > len(secret)
    assert secret[:26] not in results["a"][0]


def _tap(listener: socket.socket, to: tuple[str, int], passed: list[bytes]) -> None:
    near, _ = listener.accept()
    far = socket.create_connection(to)
    threads = [
        threading.Thread(target=_copy, args=(x, y, passed), daemon=True)
        for x, y in ((near, far), (far, near))
    ]
    for thread in threads:
        thread.start()


def _copy(source: socket.socket, sink: socket.socket, passed: list[bytes]) -> None:
    while data := source.recv(65536):
        passed.append(data)
        sink.sendall(data)


def test_direct_groups_are_as_they_were(authority: Authority) -> None:
    keys = {"a": Keys(), "b": Keys()}
    assert open_here(keys, identity_of(authority, "a")) is None

    def direct(store: MemoryStore, me: str) -> bool:
        group = form_group(
            None, store, "e", ["a", "b"], me, ADDRESSES[me], LIMIT, LIMIT, lambda: False
        )
        assert type(group) is PeerGroup
        return swap(group, me, 100_000, 1)

    with shared_store() as store:
        assert run_each({s: partial(direct, store, s) for s in "ab"}) == {"a": True, "b": True}


def test_a_peer_without_a_tunnel_is_told_apart(authority: Authority) -> None:
    keys = {"a": Keys(advertise=ADDRESSES["a"]), "b": Keys()}

    def one_side(store: MemoryStore, identity: Identity) -> None:
        me = identity.site
        if me == "a":
            form(open_here(keys, identity), store, "e", ["a", "b"])
        else:
            form_group(None, store, "e", ["a", "b"], me, ADDRESSES[me], LIMIT, LIMIT, lambda: False)

    with shared_store() as store:
        results = run_each({s: partial(one_side, store, identity_of(authority, s)) for s in "ab"})
    assert "site b exchanges without a tunnel" in results["a"]
    assert "a peer exchanges through a tunnel (127.0.0.11)" in results["b"]
    assert all("advertise and ports" in result for result in results.values())


def test_an_unreachable_address_is_named_with_the_mend(authority: Authority) -> None:
    closed = free_port(ADDRESSES["a"])
    keys = {"a": Keys(f"{ADDRESSES['a']}:{closed}", f"{closed + 1}-{closed + 1}"), "b": Keys()}

    def one_side(store: MemoryStore, identity: Identity) -> None:
        tunnel = open_here(keys, identity)
        assert tunnel is not None
        tunnel.group(store, "e", ["a", "b"], 1.0, 1.0, lambda: False)

    with shared_store() as store:
        results = run_each({s: partial(one_side, store, identity_of(authority, s)) for s in "ab"})
    assert results["b"] == (
        f"UnreachedError: site a cannot be reached at 127.0.0.11:{closed}, as it announces "
        "(Connection refused); set sites.a.advertise and sites.a.ports to where its router lets "
        "this site in"
    )
    assert results["a"].startswith("UnreachedError: ")


class Unreachable:
    """A carrier whose peers never answer."""

    def dial(self, *_: object) -> int:
        """Try."""
        raise UnreachableError("no answer")


def blob(port: int) -> bytes:
    """What Gloo publishes on 127.0.0.2."""
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + bytes([127, 0, 0, 2])
    return struct.pack("=QQ", 0, 136) + address.ljust(128, b"\0") + struct.pack("=qqq", -1, 0, 1)


def test_a_change_of_members_ends_the_wait_for_an_unreachable_peer() -> None:
    answers = iter([False, False, True])
    mine, peer = (Announcement("203.0.113.7", 1, "0" * 32, chosen) for chosen in (False, True))
    passage = Passage(
        cast(Carrier, Unreachable()), mine, ["a", "b"], "a", 60.0, 5.0, lambda: next(answers)
    )
    with pytest.raises(EpochChangedError, match="while b was being reached"):
        passage.on_get("0/1", announce(peer, blob(1234)))
    assert next(answers, None) is None


def test_a_rank_that_is_killed_takes_its_carrier_along(authority: Authority) -> None:
    def rank(pipe: Connection) -> None:
        tunnel = open_here({"a": Keys(advertise="127.0.0.11")}, identity_of(authority, "a"))
        assert tunnel is not None
        pipe.send((tunnel.carrier_pid, tunnel.port))
        signal.pause()

    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=rank, args=(theirs,))
    process.start()
    try:
        assert ours.poll(LIMIT)
        pid, port = ours.recv()
        socket.create_connection(("127.0.0.11", port)).close()
        assert Path(f"/proc/{pid}").exists()
    finally:
        process.kill()
        process.join()

    def port_free() -> bool:
        try:
            socket.create_server(("127.0.0.11", port)).close()
        except OSError:
            return False
        return True

    assert until(port_free)


def test_a_taken_port_ends_the_carrier_s_process_too(authority: Authority) -> None:
    def one_side(identity: Identity) -> str:
        with socket.create_server(("127.0.0.11", 0)) as taken:
            port = taken.getsockname()[1]
            try:
                open_here({"a": Keys(ports=f"{port}-{port}")}, identity)
            except ConfigError as error:
                # A child that was still there could be waited for.
                with pytest.raises(ChildProcessError):
                    os.waitpid(-1, os.WNOHANG)
                return str(error)
        return "no error"

    results = run_each({"a": partial(one_side, identity_of(authority, "a"))})
    assert results["a"].startswith("sites.a.ports: port ")


def test_taken_ports_are_found_before_a_rank_is_started() -> None:
    with socket.create_server(("127.0.0.11", 0)) as taken:
        port = taken.getsockname()[1]
        keys = Keys(ports=f"{port}-{port}")
        with pytest.raises(ConfigError, match=rf"sites\.a\.ports: port {port} on 127\.0\.0\.11"):
            check_ports("a", keys, 1, "127.0.0.11")
    check_ports("a", keys, 1, "127.0.0.11")
    check_ports("a", Keys(), 1, "none0")  # any port will do


def test_an_interface_has_an_address() -> None:
    assert interface_address("a", "lo") == "127.0.0.1"
    assert interface_address("a", "10.1.2.3") == "10.1.2.3"
    with pytest.raises(ConfigError, match=r'interface "none0" .* set sites\.a\.interface'):
        interface_address("a", "none0")
