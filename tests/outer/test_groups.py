"""Links between sites: real Gloo groups over a rendezvous store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilocox.errors import ExchangeError
from dilocox.outer.groups import (
    FIRST_BYTES,
    PIECE_BYTES,
    PIECES_UNDER_WAY,
    CoordinatorStore,
    EpochChangedError,
    PeerGroup,
    Transfer,
    _unless,
    gloo_device,
)
from tests.outer.sites import CONTEXT, MemoryStore, run_each, shared_store, until

HERE = "127.0.0.1"
LIMIT = 60.0


def group(store: MemoryStore, me: str, silence: float = 20.0) -> PeerGroup:
    return PeerGroup(store, "epoch/1/x", ["a", "b"], me, HERE, 20.0, silence, lambda: False)


def test_tensors_of_several_pieces_cross_both_ways_at_once() -> None:
    size = 2 * PIECE_BYTES + 5

    def side(me: str, store: MemoryStore) -> Callable[[], bool]:
        def go() -> bool:
            peers = group(store, me)
            other = "b" if me == "a" else "a"
            mine = (torch.arange(size) * (3 if me == "a" else 5)).to(torch.uint8)
            theirs = (torch.arange(size) * (5 if me == "a" else 3)).to(torch.uint8)
            buffer = torch.zeros(size, dtype=torch.uint8)
            transfers = [peers.receive(buffer, other, 7), peers.send(mine, other, 7)]
            assert all(transfer.poll(20.0) for transfer in transfers)
            return torch.equal(buffer, theirs)

        return go

    with shared_store() as store:
        assert run_each({me: side(me, store) for me in "ab"}) == {"a": True, "b": True}


def test_a_peer_that_dies_breaks_the_link_at_once() -> None:
    def dying(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            group(store, "b")
            return "gone"  # and its process ends

        return go

    def waiting(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            peers = group(store, "a")
            start = time.monotonic()
            transfer = peers.receive(torch.empty(10, dtype=torch.uint8), "b", 1)
            try:
                transfer.poll(15.0)
            except ExchangeError as error:
                return f"{error} within {time.monotonic() - start < 5.0}"
            return "nothing"

        return go

    with shared_store() as store:
        results = run_each({"a": waiting(store), "b": dying(store)})
    assert results["a"].startswith("link to b broke: ")
    assert results["a"].endswith("within True")
    assert "\n" not in results["a"]


def test_a_silent_peer_is_given_up_after_the_limit() -> None:
    def side(me: str, store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            peers = group(store, me, silence=0.5)
            if me == "b":
                until(lambda: store.kv_check(["done"]))
                return "silent"
            transfer = peers.receive(torch.empty(10, dtype=torch.uint8), "b", 1)
            try:
                transfer.poll(15.0)
                return "nothing"
            except ExchangeError as error:
                return str(error)
            finally:
                store.kv_set("done", b"")

        return go

    with shared_store() as store:
        results = run_each({me: side(me, store) for me in "ab"})
    assert results["a"].startswith("link to b broke: ")


class Work:
    """A piece under way that ends when told."""

    def __init__(self, may_end: threading.Event) -> None:
        self._may_end = may_end

    def wait(self) -> bool:
        return self._may_end.wait(10.0)


def test_pieces_are_under_way_at_once_and_giving_up_starts_no_more() -> None:
    """At once: a receive that is made after a send is announced behind all that this has sent."""
    started, may_end = list[int](), threading.Event()

    def start(piece: torch.Tensor) -> Work:
        started.append(piece.numel())
        return Work(may_end)

    transfer = Transfer(start, "b", torch.empty(9 * PIECE_BYTES, dtype=torch.uint8), "receive")  # type: ignore[arg-type]
    first = [FIRST_BYTES, *[PIECE_BYTES] * (PIECES_UNDER_WAY - 1)]
    assert started == first
    transfer.give_up()
    may_end.set()
    assert transfer.poll(10.0)
    assert started == first


def test_all_pieces_travel_a_few_at_a_time() -> None:
    started, may_end = list[int](), threading.Event()
    may_end.set()

    def start(piece: torch.Tensor) -> Work:
        started.append(piece.numel())
        return Work(may_end)

    transfer = Transfer(start, "b", torch.empty(6 * PIECE_BYTES, dtype=torch.uint8), "send")  # type: ignore[arg-type]
    assert transfer.poll(10.0)
    assert started == [FIRST_BYTES, *[PIECE_BYTES] * 5, PIECE_BYTES - FIRST_BYTES]


def test_a_transfer_that_cannot_begin_says_why() -> None:
    def start(piece: torch.Tensor) -> Work:
        raise RuntimeError("connection reset\nat pair.cc:42")

    transfer = Transfer(start, "b", torch.empty(100, dtype=torch.uint8), "send")  # type: ignore[arg-type]
    with pytest.raises(ExchangeError, match=r"^link to b broke: connection reset$"):
        transfer.poll(10.0)


def test_forming_a_group_says_who_is_missing() -> None:
    with pytest.raises(ExchangeError, match=r"epoch/1/x/.*within 0\.1 s; is network\.interface"):
        CoordinatorStore(MemoryStore({}), "epoch/1/x/", 0.1, lambda: False).get("rank1")


def test_a_peer_that_died_before_its_group_was_formed_is_not_waited_for() -> None:
    """Its address is there. Who is to be reached by it waits; who is to reach it is refused."""

    def waiting(store: MemoryStore) -> Callable[[], Any]:
        def go() -> Any:
            began = time.monotonic()

            def cancelled() -> bool:
                return time.monotonic() > began + 1.0

            with pytest.raises((EpochChangedError, ExchangeError), match=r"changed|refused"):
                PeerGroup(store, "g", ["a", "b"], "a", "127.0.0.1", LIMIT, LIMIT, cancelled)
            return time.monotonic() - began

        return go

    def dying(store: MemoryStore) -> Callable[[], Any]:
        def told(key: str, value: bytes) -> bytes:
            store.kv_set(f"g/{key}", value)
            os._exit(0)

        def go() -> Any:
            PeerGroup(
                store, "g", ["a", "b"], "b", "127.0.0.1", LIMIT, LIMIT, lambda: False, on_set=told
            )

        return go

    with shared_store() as store:
        # While it lives, the machine takes connections for it.
        dead = CONTEXT.Process(target=dying(store))
        dead.start()
        dead.join()
        seconds = run_each({"a": waiting(store)}, limit=LIMIT)["a"]
    assert isinstance(seconds, float), seconds
    assert seconds < LIMIT / 2


def test_forming_that_cannot_be_interrupted_is_left_when_the_members_change() -> None:
    let_go, looks = threading.Event(), [False, False, True]
    try:
        with pytest.raises(EpochChangedError, match="the members changed"):
            _unless(lambda: looks.pop(0), lambda: let_go.wait(LIMIT))
        assert not looks
    finally:
        let_go.set()


def test_a_change_of_members_ends_the_waiting() -> None:
    store = CoordinatorStore(MemoryStore({}), "epoch/1/x/", 60.0, lambda: True)
    start = time.monotonic()
    with pytest.raises(EpochChangedError):
        store.get("rank1")
    assert time.monotonic() - start < 5.0


def test_a_group_of_one_opens_nothing() -> None:
    alone = PeerGroup(MemoryStore({}), "x", ["a"], "a", "no-such-interface", 1.0, 1.0, bool)
    alone.close()


@pytest.mark.parametrize("address", ["no-such0", "203.0.113.7"])
def test_an_interface_that_is_not_there(address: str) -> None:
    with pytest.raises(ExchangeError, match=rf'interface "{address}".*network\.interface'):
        gloo_device(address)
