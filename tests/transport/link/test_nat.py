"""A site behind a router: three network namespaces, and a relay that stands for the forward."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from dilocox.coordinator.identity import Identity
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.endpoint import open_endpoint
from tests.support.thread_sites import (
    TIMEOUTS,
    Keys,
    MemoryStore,
    authority_in,
    identity_of,
    run_each,
    shared_store,
)

pytestmark = pytest.mark.waits

LIMIT = 60.0
_CLONE_NEWNET = 0x40000000
INSIDE, OUTSIDE = "10.201.1", "10.201.2"
"""The home network of the site behind the router, and the network of the other one."""


@dataclass(frozen=True)
class Network:
    """Names of the namespaces: home - router - away. The router forwards no packets."""

    home: str
    router: str
    away: str


def ip(*words: str) -> None:
    """Run `ip`; an error says what it said."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def network() -> Iterator[Network]:
    """home 10.201.1.2 - 10.201.1.1 router 10.201.2.1 - 10.201.2.2 away."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    names = [f"dilocox-{os.getpid()}-{place}" for place in ("home", "router", "away")]
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
                ip("-n", name, "link", "set", "lo", "up")
            for number, (net, host) in enumerate(((INSIDE, names[0]), (OUTSIDE, names[2]))):
                ip("-n", host, "link", "add", "veth0", "type", "veth",
                   "peer", "name", f"veth{number}", "netns", names[1])  # fmt: skip
                ip("-n", host, "addr", "add", f"{net}.2/24", "dev", "veth0")
                ip("-n", host, "link", "set", "veth0", "up")
                ip("-n", names[1], "addr", "add", f"{net}.1/24", "dev", f"veth{number}")
                ip("-n", names[1], "link", "set", f"veth{number}", "up")
                ip("-n", host, "route", "add", "default", "via", f"{net}.1")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield Network(*names)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)


def forward(namespace: str, ports: dict[int, int], store: MemoryStore) -> str:
    """The router's port forwards, from outside to the home site, until the test says so."""
    enter(namespace)

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()

    def serve(listener: socket.socket, to: int) -> None:
        while True:
            outer, _ = listener.accept()
            inner = socket.create_connection((f"{INSIDE}.2", to))
            for pair in ((outer, inner), (inner, outer)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    for outside, inside in ports.items():
        listener = socket.create_server((f"{OUTSIDE}.1", outside))
        threading.Thread(target=serve, args=(listener, inside), daemon=True).start()
    store.kv_set("router", b"")
    store.kv_get(["done/home", "done/away"], LIMIT)
    return "served"


def _wall_before(host: str) -> str:
    """A host that packets reach answers, be it by a refusal."""
    try:
        socket.create_connection((host, 29601), timeout=0.3).close()
    except ConnectionRefusedError:
        return "reached"
    except OSError:
        return "walled"
    return "reached"


def takes_part(
    namespace: str, address: str, store: MemoryStore, identity: Identity, sites: list[str],
    keys: dict[str, Keys], rank: int,
) -> str:  # fmt: skip
    """One rank of a site: swaps bytes with its peer in two groups."""
    enter(namespace)
    me = identity.site
    other = next(site for site in sites if site != me)
    store.kv_get(["router"], LIMIT)
    endpoint = open_endpoint(keys, identity, rank, 2, address, TIMEOUTS)
    wall = _wall_before(f"{INSIDE}.2" if me == "away" else f"{OUTSIDE}.2")
    for name in ("epoch/1/0/1", "epoch/2/0/1"):
        group = PeerGroup(endpoint, store, name, sites, LIMIT, LIMIT, lambda: False)
        mine = torch.full((1_000_000,), sites.index(me) + 1, dtype=torch.uint8)
        theirs = torch.zeros_like(mine)
        transfers = [group.send(mine, other, 1), group.receive(theirs, other, 1)]
        assert all(transfer.poll(LIMIT) for transfer in transfers)
        assert bool((theirs == sites.index(other) + 1).all())
        store.kv_set(f"{name}/done/{me}", b"")
        store.kv_get([f"{name}/done/{site}" for site in sites], LIMIT)
        group.close()
    store.kv_set(f"done/{me}", b"")
    endpoint.close()
    return wall


@pytest.mark.parametrize(
    "sites", [["home", "away"], pytest.param(["away", "home"], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("advertise", "ports"),
    [(f"{OUTSIDE}.1", {29601: 29601}), (f"{OUTSIDE}.1:40000", {40001: 29601})],
    ids=["same-ports", "other-ports"],
)
def test_a_site_behind_a_router_is_reached_at_its_advertised_address(
    network: Network,
    tmp_path_factory: pytest.TempPathFactory,
    sites: list[str],
    advertise: str,
    ports: dict[int, int],
) -> None:
    authority = authority_in(tmp_path_factory.mktemp("authority"))
    # The away site says nothing of its own and cannot be reached at all.
    keys = {"home": Keys(advertise, "29600-29601"), "away": Keys()}
    with shared_store() as store:
        results = run_each(
            {
                "router": partial(forward, network.router, ports, store),
                "home": partial(
                    takes_part, network.home, "veth0", store, identity_of(authority, "home"),
                    sites, keys, 1,
                ),
                "away": partial(
                    takes_part, network.away, f"{OUTSIDE}.2", store,
                    identity_of(authority, "away"), sites, keys, 1,
                ),
            }
        )  # fmt: skip
    assert results == {"router": "served", "home": "walled", "away": "walled"}
