"""Groups of sites as real processes: TLS between them, connections that break, peers that die."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dilocox.errors import ConfigError, ExchangeError
from dilocox.transport.groups import EpochChangedError, PeerGroup
from dilocox.transport.link import link
from dilocox.transport.link.addresses import Announcement, Door, announce
from dilocox.transport.link.endpoint import LinkEndpoint
from dilocox.transport.link.frames import CHUNK_BYTES
from dilocox.transport.unreached import UnreachedError
from tests.support.linked import endpoint_of, group_of
from tests.support.thread_sites import CONTEXT, MemoryStore, run_each, shared_store, until

pytestmark = pytest.mark.waits

LIMIT = 60.0


def noise(sender: str, receiver: str, size: int) -> torch.Tensor:
    """Bytes that no other pair sends."""
    generator = torch.Generator().manual_seed(ord(sender) * 256 + ord(receiver))
    return torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)


def swap(group: PeerGroup, size: int, tag: int) -> bool:
    """Everybody sends to everybody; whether all that came is what was sent."""
    me, others = group.me, [site for site in group.sites if site != group.me]
    arrived = {site: torch.zeros(size, dtype=torch.uint8) for site in others}
    transfers = [group.receive(tensor, site, tag) for site, tensor in arrived.items()]
    transfers += [group.send(noise(me, site, size), site, tag) for site in others]
    done = all(transfer.poll(LIMIT) for transfer in transfers)
    return done and all(torch.equal(arrived[s], noise(s, me, size)) for s in others)


def together(store: MemoryStore, word: str, sites: Sequence[str], me: str) -> None:
    """Wait until all are here."""
    store.kv_set(f"{word}/{me}", b"")
    store.kv_get([f"{word}/{site}" for site in sites], LIMIT)


def epochs(store: MemoryStore, sites: str, me: str) -> dict[str, object]:
    """A site's part in two groups at a time, then in a third one."""
    before = threading.active_count()
    endpoint = endpoint_of(me, f"127.0.0.{11 + ord(me) - ord('a')}")

    def form(name: str, members: Sequence[str]) -> PeerGroup:
        return PeerGroup(endpoint, store, name, members, LIMIT, LIMIT, lambda: False)

    groups = [form(f"epoch/{n}", list(sites)) for n in (1, 2)]
    same = [swap(group, 3 * CHUNK_BYTES + 1, tag) for group in groups for tag in (1, 2)]
    together(store, "swapped", sites, me)
    for group in groups:
        group.close()
    del group, groups
    third = form("epoch/3", list(sites)[::-1])
    same.append(swap(third, 1, 1))
    together(store, "third", sites, me)
    del third  # without close, as after an entry
    endpoint.close()
    left = until(lambda: threading.active_count() == before)
    socket.create_server((endpoint.host, endpoint.port)).close()  # the port is free again
    return {"same": same, "left": left}


def test_groups_one_after_the_other_and_two_at_a_time() -> None:
    with shared_store() as store:
        found = run_each({me: partial(epochs, store, "abc", me) for me in "abc"})
    assert all(found[me] == {"same": [True] * 5, "left": True} for me in "abc")


def forgets(store: MemoryStore, me: str) -> list[bool]:
    """Whether messages are freed after their end without a garbage collection.

    First a sends, then b, then both.
    """
    other = "b" if me == "a" else "a"
    group = group_of(store, "forgets", "ab", me)
    gc.disable()

    def moved(tag: int, senders: str) -> bool:
        data = torch.zeros(9, dtype=torch.uint8), noise(me, other, 9)
        transfers = [group.receive(data[0], other, tag)] if other in senders else []
        transfers += [group.send(data[1], other, tag)] if me in senders else []
        assert all(transfer.poll(LIMIT) for transfer in transfers)
        left = [weakref.ref(each) for each in (*transfers, *(d.untyped_storage() for d in data))]
        del data, transfers
        # A message that was sent stays until the peer has acknowledged it. The link's threads,
        # which wait then, hold no message.
        free = until(lambda: not any(each() for each in left), limit=5.0)
        together(store, f"freed {tag}", "ab", me)
        return free

    return [moved(tag, senders) for tag, senders in enumerate(("a", "b", "ab"), 1)]


def test_payloads_are_freed_without_a_garbage_collection() -> None:
    with shared_store() as store:
        found = run_each({me: partial(forgets, store, me) for me in "ab"})
    assert found == {"a": [True] * 3, "b": [True] * 3}


class Tap:
    """A way to a site on which a test reads along, and which the test cuts."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = self._door.getsockname()
        self.passed: list[bytes] = []
        self.count = 0
        self.cut_after: int | None = None
        self.frozen = threading.Event()
        """Nothing passes any more on the connections that there are; new ones work."""
        self.taken = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self._door.accept()
            self.taken += 1
            far = socket.create_connection(self._to)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        frozen = self.frozen
        try:
            while data := source.recv(65536):
                if frozen.is_set():
                    continue
                self.passed.append(data[:4096])
                self.count += len(data)
                sink.sendall(data)
                if self.cut_after is not None and self.count > self.cut_after:
                    self.cut_after = None
                    break
        except OSError:
            pass
        for item in (source, sink):
            try:
                item.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def tapped(me: str) -> tuple[LinkEndpoint, Tap | None]:
    """An endpoint, that of b behind a tap."""
    endpoint = endpoint_of(me)
    if me != "b":  # the site named first connects
        return endpoint, None
    tap = Tap((endpoint.host, endpoint.port))
    endpoint.host, endpoint.port = tap.address
    return endpoint, tap


def through_a_tap(
    store: MemoryStore, me: str, size: int, cuts: Sequence[int]
) -> tuple[bool, int, bool]:
    """Swap with a peer by a way that is cut after so many bytes, again and again; whether all came,
    connections, and whether anything of it could be read on the way."""
    endpoint, tap = tapped(me)
    group = PeerGroup(endpoint, store, "epoch/1", ["a", "b"], LIMIT, LIMIT, lambda: False)
    same = []
    for tag, cut in enumerate(cuts):
        together(store, f"round/{tag}", "ab", me)
        if tap is not None:
            tap.cut_after = tap.count + cut
        same.append(swap(group, size, tag))
    together(store, "done", "ab", me)
    seen = tap is not None and noise("a", "b", size).numpy().tobytes()[:64] in b"".join(tap.passed)
    return all(same), 0 if tap is None else tap.taken, seen


def test_a_connection_that_breaks_goes_on_where_it_broke_and_nothing_is_in_the_clear() -> None:
    size, cuts = 8 * CHUNK_BYTES, [1, 100, CHUNK_BYTES + 77, 5 * CHUNK_BYTES, 9 * CHUNK_BYTES]
    with shared_store() as store:
        found = run_each({me: partial(through_a_tap, store, me, size, cuts) for me in "ab"})
    whole, connections, in_the_clear = found["b"]
    assert found["a"] == (True, 0, False)
    assert (whole, in_the_clear) == (True, False)
    # Each cut takes a connection. On a busy machine a new one may need a second try.
    assert len(cuts) < connections <= len(cuts) + 2


def through_a_silent_way(store: MemoryStore, me: str) -> tuple[bool, int]:
    """A way that swallows all from the second round on, as a router does that has forgotten a
    connection; whether all came, and how many connections there were."""
    endpoint, tap = tapped(me)
    group = PeerGroup(endpoint, store, "epoch/1", ["a", "b"], LIMIT, 12.0, lambda: False)
    same = [swap(group, 1000, 1)]
    together(store, "first", "ab", me)
    if tap is not None:
        tap.frozen.set()
        tap.frozen = threading.Event()
    together(store, "frozen", "ab", me)
    same.append(swap(group, 1000, 2))
    together(store, "done", "ab", me)
    return all(same), 0 if tap is None else tap.taken


@pytest.mark.slow
def test_a_connection_that_a_router_has_forgotten_is_made_again() -> None:
    with shared_store() as store:
        found = run_each({me: partial(through_a_silent_way, store, me) for me in "ab"})
    assert found == {"a": (True, 0), "b": (True, 2)}


def after_a_long_round(store: MemoryStore, me: str) -> tuple[bool, int]:
    """Two swaps with hours of training in between; whether all came, and connections."""
    idle = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + idle[0])
    endpoint, tap = tapped(me)
    with patch.object(link, "time", clock):
        group = PeerGroup(endpoint, store, "epoch/1", ["a", "b"], LIMIT, LIMIT, lambda: False)
        same = [swap(group, 1000, 1)]
        together(store, "first", "ab", me)
        idle[0] += 1e4
        same.append(swap(group, 1000, 2))
        together(store, "done", "ab", me)
    return all(same), 0 if tap is None else tap.taken


def test_a_connection_outlasts_a_round_in_which_nothing_is_sent() -> None:
    """Only who waits for something may take a silent connection for a dead one."""
    with shared_store() as store:
        found = run_each({me: partial(after_a_long_round, store, me) for me in "ab"})
    assert found == {"a": (True, 0), "b": (True, 1)}


def test_a_connection_has_no_key_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "RENEW_BYTES", 3 * CHUNK_BYTES)
    with shared_store() as store:
        parts = {me: partial(through_a_tap, store, me, 8 * CHUNK_BYTES, [1 << 40]) for me in "ab"}
        found = run_each(parts)
    assert found["a"] == (True, 0, False)
    assert found["b"][0]
    assert found["b"][1] >= 3


@pytest.mark.parametrize("dies", ["a", "b"], ids=["who-connects", "who-is-connected-to"])
def test_a_peer_that_dies_breaks_the_link_at_once(dies: str) -> None:
    """Within seconds, and not after the time that a link may be silent."""

    def dying(store: MemoryStore) -> str:
        group_of(store, "epoch/1", ["a", "b"], dies)
        store.kv_get(["posted"], LIMIT)
        return "gone"  # and its process ends

    def waiting(store: MemoryStore, me: str) -> str:
        group = group_of(store, "epoch/1", ["a", "b"], me)
        transfer = group.receive(torch.empty(10, dtype=torch.uint8), dies, 1)
        store.kv_set("posted", b"")
        start = time.monotonic()
        try:
            transfer.poll(40.0)
        except ExchangeError as error:
            return f"{error} within {time.monotonic() - start < 20.0}"
        return "nothing"

    lives = "b" if dies == "a" else "a"
    with shared_store() as store:
        results = run_each({dies: partial(dying, store), lives: partial(waiting, store, lives)})
    assert results[lives].startswith(f"link to {dies} broke: ")
    assert results[lives].endswith("within True")
    assert "\n" not in results[lives]


@pytest.mark.parametrize(
    ("closes", "silence", "said"),
    [
        (False, 0.5, "link to b broke: nothing has moved for 0.5 s"),
        (True, LIMIT, "link to b broke: it has closed the group"),
    ],
    ids=["silent", "closed"],
)
def test_what_comes_to_nothing_is_given_up(closes: bool, silence: float, said: str) -> None:
    """A peer is silent for longer than it may, or closes its group."""

    def side(store: MemoryStore, me: str) -> str:
        group = group_of(store, "epoch/1", ["a", "b"], me, silence=silence)
        if me == "b":
            store.kv_get(["posted"], LIMIT)
            if closes:
                group.close()
            store.kv_get(["done"], LIMIT)
            return "waited"
        transfer = group.receive(torch.empty(10, dtype=torch.uint8), "b", 1)
        store.kv_set("posted", b"")
        try:
            transfer.poll(15.0)
            return "nothing"
        except ExchangeError as error:
            return str(error)
        finally:
            store.kv_set("done", b"")

    with shared_store() as store:
        results = run_each({me: partial(side, store, me) for me in "ab"})
    assert results == {"a": said, "b": "waited"}


def outlives(store: MemoryStore, me: str) -> bool:
    """A site's part in a group that is used after the attempt that formed it."""
    formed = threading.Event()
    group = group_of(store, "epoch/1", ["a", "b"], me, cancelled=formed.is_set)
    formed.set()
    same = swap(group, 3 * CHUNK_BYTES + 1, 1)
    together(store, "swapped", "ab", me)
    return same


def test_a_group_outlives_the_attempt_that_formed_it() -> None:
    """Members of a later exchange do not ask whether the first one of their group is repeated."""
    with shared_store() as store:
        said = run_each({me: partial(outlives, store, me) for me in "ab"})
    assert said == {"a": True, "b": True}


def test_a_change_of_members_ends_a_transfer() -> None:
    """One that waits for a donor is not left to the silence that a link may have."""

    def side(store: MemoryStore, me: str) -> str:
        changed = partial(store.kv_check, ["changed"])
        group = group_of(store, "epoch/1", ["a", "b"], me)
        group.watch(changed)
        if me == "b":
            store.kv_get(["done"], LIMIT)
            return "silent"
        transfer = group.receive(torch.empty(10, dtype=torch.uint8), "b", 1)
        store.kv_set("changed", b"")
        try:
            transfer.poll(15.0)
            return "nothing"
        except EpochChangedError:
            return "changed"
        finally:
            store.kv_set("done", b"")

    with shared_store() as store:
        assert run_each({me: partial(side, store, me) for me in "ab"})["a"] == "changed"


def test_ipv6_will_do() -> None:
    if not _has_ipv6():
        pytest.skip("no IPv6 on this machine")

    def side(store: MemoryStore, me: str) -> bool:
        return swap(group_of(store, "epoch/1", ["a", "b"], me, address="::1"), 1000, 1)

    with shared_store() as store:
        assert run_each({me: partial(side, store, me) for me in "ab"}) == {"a": True, "b": True}


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_forming_a_group_says_who_is_missing() -> None:
    with pytest.raises(
        UnreachedError, match=r"epoch/1.*within 0\.1 s.*network\.interface"
    ) as found:
        group_of(MemoryStore({}), "epoch/1", ["a", "b", "c"], "a", timeout=0.1)
    assert found.value.sites == ["b"]


@pytest.mark.parametrize("said", [b"dilocox", b"{}", b"[" * 60_000, b"\xff"])
def test_a_peer_that_announces_rubbish_is_the_one_that_is_not_reached(said: bytes) -> None:
    """It costs this peer the others' link, and the others nothing."""
    magic = announce(Announcement("::1", 1, "0" * 32, False)).partition(b"{")[0]
    for value in (said, magic + said):
        store = MemoryStore({"epoch/1/b": value})
        with pytest.raises(UnreachedError, match="site b: a peer's announcement") as found:
            group_of(store, "epoch/1", ["a", "b"], "a", timeout=1.0)
        assert found.value.sites == ["b"]


@pytest.mark.parametrize("host", ["a\0b", "x" * 64 + ".", "\udc80", "." * 200])
def test_a_peer_that_announces_no_host_is_not_reached(host: str) -> None:
    peer = Announcement(host, 1, "0" * 32, False)
    store = MemoryStore({"epoch/1/b": announce(peer)})
    with pytest.raises(UnreachedError) as found:
        group_of(store, "epoch/1", ["a", "b"], "a", timeout=0.1)
    assert found.value.sites == ["b"]


def test_a_peer_that_refuses_is_named_with_the_mend() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        closed = int(found.getsockname()[1])

    def side(store: MemoryStore, me: str) -> list[str]:
        endpoint = endpoint_of(me)
        if me == "b":
            endpoint.port = closed
        together(store, "there", "abc", me)  # nobody's time goes by before all have begun
        try:
            PeerGroup(endpoint, store, "epoch/1", ["a", "b", "c"], 3.0, LIMIT, lambda: False)
        except UnreachedError as error:
            return [str(error), *error.sites]
        return ["nothing"]

    with shared_store() as store:
        results = run_each({me: partial(side, store, me) for me in "abc"})
    assert results["a"] == [
        f"site b cannot be reached at 127.0.0.1:{closed}, as it announces (Connection refused); "
        "set sites.b.advertise and sites.b.ports to where its router lets this site in",
        "b",
    ]


def test_a_peer_that_died_before_its_group_was_formed_is_not_waited_for() -> None:
    def dying(store: MemoryStore) -> None:
        class Store:
            """Ends the process behind the announcement."""

            def kv_set(self, key: str, value: bytes) -> None:
                store.kv_set(key, value)
                os._exit(0)

        group_of(Store(), "epoch/1", ["a", "b"], "b")

    def waiting(store: MemoryStore) -> Any:
        began = time.monotonic()
        with pytest.raises(UnreachedError, match="refused"):
            group_of(store, "epoch/1", ["a", "b"], "a")
        return time.monotonic() - began

    with shared_store() as store:
        dead = CONTEXT.Process(target=dying, args=(store,))
        dead.start()
        dead.join()
        seconds = run_each({"a": partial(waiting, store)}, limit=LIMIT)["a"]
    assert isinstance(seconds, float), seconds
    assert seconds < LIMIT / 2


def test_a_change_of_members_ends_the_forming() -> None:
    start = time.monotonic()
    with pytest.raises(EpochChangedError):
        group_of(MemoryStore({}), "epoch/1", ["a", "b"], "a", cancelled=lambda: True)
    assert time.monotonic() - start < LIMIT / 2


def test_another_version_s_announcement_is_refused() -> None:
    store = MemoryStore({"epoch/1/b": b"a Gloo address"})
    with pytest.raises(ExchangeError, match="run the same dilocox version at all sites"):
        group_of(store, "epoch/1", ["a", "b"], "a")


def test_a_group_of_one_has_no_links() -> None:
    alone = group_of(MemoryStore({}), "x", ["a"], "a", timeout=0.1)
    alone.close()


@pytest.mark.parametrize("address", ["no-such0", "203.0.113.7"])
def test_an_interface_that_is_not_there(address: str) -> None:
    with pytest.raises(ConfigError, match=rf'interface "{address}".*network\.interface'):
        endpoint_of("a", address)


def test_a_rank_that_is_reached_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set sites\.a\.advertise"):
        endpoint_of("a", "0.0.0.0")
    reached = endpoint_of("a", "0.0.0.0", Door(0, "203.0.113.7", 1234, True))
    assert (reached.host, reached.port) == ("203.0.113.7", 1234)
    reached.close()
