"""How a site takes over state: donor and receiver over a real link."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.errors import DilocoxError, ExchangeError, JoinError
from dilocox.outer.snapshot import Snapshot
from dilocox.transport import state_transfer
from dilocox.transport.groups import PeerGroup
from dilocox.transport.state_transfer import (
    BESIDE_TENSORS,
    HEADER_BYTES,
    AckHeader,
    Donor,
    Held,
    OwnPiece,
    PieceHeader,
    check_header,
    digest_of,
    fetch,
    read_body,
    read_header,
)
from dilocox.utils.storage import run_in_thread
from tests.support.linked import group_of
from tests.support.thread_sites import MemoryStore, run_each, shared_store, until

pytestmark = pytest.mark.waits

LIMIT = 60.0


def link(
    store: MemoryStore, me: str, donor: str = "old", silence: float | None = None
) -> PeerGroup:
    name = f"run/entry/new/1/{donor}/0/0"
    more = {} if silence is None else {"silence": silence}
    return group_of(store, name, [donor, "new"], me, **more)


def state(piece: int, momentum: float) -> dict[str, torch.Tensor]:
    return {
        "anchor": torch.arange(128, dtype=torch.float32) + piece,
        "momentum": torch.full((128,), momentum),
    }


def giving(
    store: MemoryStore,
    numbers: Sequence[int],
    tick: int,
    momentum: float,
    me: str = "old",
) -> Callable[[], str]:
    """A donor that offers pieces in this order at once; what failed, once it is done."""

    def go() -> str:
        donor = Donor(lambda: link(store, me, me), "new", len(numbers), LIMIT)
        for number in numbers:
            donor.offer(Snapshot(number, tick, state(number, momentum)))
        assert until(lambda: donor.done)
        return str(donor.failure)

    return go


def test_pieces_come_whole_in_any_order_and_known_ones_without_tensors() -> None:
    def old(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            donor = Donor(lambda: link(store, "old"), "new", 3, LIMIT)
            assert donor.waiting == {0, 1, 2}
            donor.offer(Snapshot(2, 40, state(2, 0.5)))
            assert donor.waiting == {0, 1}
            assert not donor.done
            donor.offer(Snapshot(0, 41, state(0, 0.0)))
            donor.offer(Snapshot(1, 42, state(1, 0.0)))
            assert until(lambda: donor.done)
            return str(donor.failure)

        return go

    def new(store: MemoryStore) -> Callable[[], object]:
        def go() -> object:
            got: list[Snapshot] = []
            # Piece 0 is the same here; piece 2 as well, but its momentum is not.
            known = [digest_of(state(n, 0.0)["anchor"]) for n in (0, 7, 2)]
            fetch(lambda: link(store, "new"), "old", known, [1 << 20] * 3, got.append)
            return [(s.piece, s.tick, {n: t.tolist() for n, t in s.tensors.items()}) for s in got]

        return go

    with shared_store() as store:
        results = run_each({"old": old(store), "new": new(store)})
    assert results["old"] == "None"
    assert results["new"] == [
        (2, 40, {name: tensor.tolist() for name, tensor in state(2, 0.5).items()}),
        (0, 41, {}),
        (1, 42, {name: tensor.tolist() for name, tensor in state(1, 0.0).items()}),
    ]


def test_pieces_from_elsewhere_are_not_sent_if_the_donor_has_the_same() -> None:
    """The donor waits while they are prepared, for longer than the link may be silent."""
    # The momentum tells where a piece has come from.
    said = {0: "same 0", 1: "another", 3: "same 3"}
    own = {n: OwnPiece(named(text), state(n, 0.25)) for n, text in said.items()}

    def old(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            donor = Donor(
                lambda: link(store, "old", silence=2.0), "new", 4, LIMIT,
                lambda piece: named(f"same {piece.piece}"),
            )  # fmt: skip
            for number in range(4):
                donor.offer(Snapshot(number, 40 + number, state(number, 0.5)))
            assert until(lambda: donor.done)
            return str(donor.failure)

        return go

    def new(store: MemoryStore) -> Callable[[], object]:
        class Slow:
            pause = 0.05

            def pieces(self) -> dict[int, OwnPiece]:
                threading.Event().wait(3.0)
                return own

        def go() -> object:
            got: list[Snapshot] = []
            known = [digest_of(state(n, 0.0)["anchor"]) for n in range(4)]
            fetch(
                lambda: link(store, "new", silence=2.0), "old", known, [1 << 20] * 4,
                got.append, (), Slow(),
            )  # fmt: skip
            return [(each.piece, each.tick, float(each.tensors["momentum"][7])) for each in got]

        return go

    with shared_store() as store:
        results = run_each({"old": old(store), "new": new(store)})
    assert results["old"] == "None"
    assert results["new"] == [(0, 40, 0.25), (1, 41, 0.5), (2, 42, 0.5), (3, 43, 0.25)]


def named(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_rank_of_many_pieces_enters() -> None:
    many = 90

    def new(store: MemoryStore) -> Callable[[], object]:
        def go() -> object:
            got: list[Snapshot] = []
            known = [digest_of(state(n, 0.0)["anchor"]) for n in range(many)]
            here = range(0, many, 2)
            fetch(lambda: link(store, "new"), "old", known, [1 << 20] * many, got.append, here)
            return [s.piece for s in got]

        return go

    with shared_store() as store:
        results = run_each({"old": giving(store, range(many), 40, 0.0), "new": new(store)})
    assert results == {"old": "None", "new": list(range(1, many, 2))}


def test_a_donor_whose_slot_ends_are_far_apart_is_waited_for() -> None:
    """Longer than the link may be silent: it says that it lives."""

    def near(store: MemoryStore, me: str) -> PeerGroup:
        name = "run/entry/new/1/old/0/0"
        return group_of(store, name, ["old", "new"], me, silence=0.6)

    def old(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            donor = Donor(lambda: near(store, "old"), "new", 1, 0.1)
            assert not until(lambda: donor.done, 2.0), donor.failure
            donor.offer(Snapshot(0, 40, state(0, 0.5)))
            assert until(lambda: donor.done)
            return str(donor.failure)

        return go

    def new(store: MemoryStore) -> Callable[[], object]:
        def go() -> object:
            got: list[Snapshot] = []
            fetch(lambda: near(store, "new"), "old", ["0" * 64], [1 << 20], got.append)
            return [(s.piece, s.tick) for s in got]

        return go

    with shared_store() as store:
        results = run_each({"old": old(store), "new": new(store)})
    assert results == {"old": "None", "new": [(0, 40)]}


def test_a_piece_may_travel_for_longer_than_a_link_may_be_silent() -> None:
    """Only a piece that does not move ends it, and that is for the transfer to say."""
    polls = iter([False, False, False, True])
    state_transfer._wait(cast(Any, SimpleNamespace(poll=lambda seconds: next(polls))))
    assert next(polls, None) is None


def test_a_receiver_that_dies_harms_only_its_entry() -> None:
    def old(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            donor = Donor(lambda: link(store, "old"), "new", 1, LIMIT)
            donor.offer(Snapshot(0, 1, state(0, 1.0)))
            assert until(lambda: donor.done)
            return str(donor.failure)

        return go

    def new(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            link(store, "new")
            return "dies"

        return go

    with shared_store() as store:
        results = run_each({"old": old(store), "new": new(store)})
    assert results["old"].startswith("link to new broke: ")


def test_ends_that_wait_for_the_next_piece_keep_none() -> None:
    def old(store: MemoryStore) -> Callable[[], object]:
        def go() -> object:
            donor, freed = Donor(lambda: link(store, "old"), "new", 2, 0.05), threading.Event()
            piece = Snapshot(0, 40, state(0, 0.5))
            weakref.finalize(piece.tensors["anchor"], freed.set)
            donor.offer(piece)
            del piece
            store.kv_get(["received"], LIMIT)
            free = freed.wait(10.0)
            donor.offer(Snapshot(1, 41, state(1, 0.5)))
            assert until(lambda: donor.done)
            return donor.failure or free

        return go

    def new(store: MemoryStore) -> Callable[[], object]:
        def go() -> object:
            got, freed = list[int](), threading.Event()

            def take(snapshot: Snapshot) -> None:
                got.append(snapshot.piece)
                if snapshot.piece == 0:
                    weakref.finalize(snapshot.tensors["anchor"], freed.set)

            known, limits = ["0" * 64] * 2, [1 << 20] * 2
            fetching = run_in_thread(
                lambda: fetch(lambda: link(store, "new"), "old", known, limits, take)
            )
            free = freed.wait(10.0)
            store.kv_set("received", b"")
            fetching.result(LIMIT)
            return got, free

        return go

    with shared_store() as store:
        results = run_each({"old": old(store), "new": new(store)})
    assert results == {"old": True, "new": ([0, 1], True)}


def test_two_receivers_get_the_same_snapshot() -> None:
    """Donors only read its tensors, so all of them may send it at once."""

    def old(store: MemoryStore) -> Callable[[], object]:
        def go() -> object:
            piece = Snapshot(0, 40, state(0, 0.5))
            donors = [
                Donor(partial(group_of, store, site, ["old", site], "old"), site, 1, LIMIT)
                for site in "bc"
            ]
            for donor in donors:
                donor.offer(piece)
            assert until(lambda: all(donor.done for donor in donors))
            same = [torch.equal(piece.tensors[n], each) for n, each in state(0, 0.5).items()]
            return [donor.failure for donor in donors], same

        return go

    def new(store: MemoryStore, site: str) -> Callable[[], object]:
        def go() -> object:
            got: list[Snapshot] = []
            form = partial(group_of, store, site, ["old", site], site)
            fetch(form, "old", ["0" * 64], [1 << 20], got.append)
            return {name: tensor.tolist() for name, tensor in got[0].tensors.items()}

        return go

    with shared_store() as store:
        results = run_each({"old": old(store), "b": new(store, "b"), "c": new(store, "c")})
    assert results["old"] == ([None, None], [True, True])
    whole = {name: tensor.tolist() for name, tensor in state(0, 0.5).items()}
    assert results["b"] == results["c"] == whole


def test_an_ended_donor_keeps_no_piece() -> None:
    """Neither pieces that it could not send, nor pieces that are offered after its end."""
    broken = threading.Event()

    def form() -> PeerGroup:
        assert broken.wait(LIMIT)
        raise ExchangeError("new cannot be reached")

    donor = Donor(form, "new", 2, LIMIT)
    pieces = [Snapshot(number, 1, state(number, 1.0)) for number in range(2)]
    freed = [weakref.ref(piece.tensors["anchor"]) for piece in pieces]
    donor.offer(pieces.pop(0))
    assert freed[0]() is not None
    broken.set()
    assert until(lambda: donor.done)
    donor.offer(pieces.pop(0))
    donor.cancel()
    assert [each() for each in freed] == [None, None]
    assert donor.failure == "new cannot be reached"
    assert not donor.waiting


def test_a_second_donor_sends_what_the_first_has_not() -> None:
    def first(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            donor = Donor(lambda: link(store, "old"), "new", 3, LIMIT)
            donor.offer(Snapshot(1, 40, state(1, 0.5)))
            assert until(lambda: store.kv_check(["had one"]))
            # Its site is told that the receiver has another donor: the thread does not stay.
            donor.cancel()
            assert until(lambda: donor.done)
            return str(donor.failure)

        return go

    def new(store: MemoryStore) -> Callable[[], object]:
        def go() -> object:
            got: list[Snapshot] = []

            def take(snapshot: Snapshot) -> None:
                got.append(snapshot)
                if len(got) == 1:
                    store.kv_set("had one", b"")

            known, limits = ["0" * 64] * 3, [1 << 20] * 3
            with pytest.raises(ExchangeError, match="link to old broke"):
                fetch(lambda: link(store, "new"), "old", known, limits, take)
            fetch(lambda: link(store, "new", "next"), "next", known, limits, take, {1})
            return [(s.piece, s.tick) for s in got]

        return go

    with shared_store() as store:
        results = run_each(
            {
                "old": first(store),
                "next": giving(store, (1, 0, 2), 41, 0.5, "next"),
                "new": new(store),
            }
        )
    assert results["old"] == "new no longer waits for this site"
    assert results["next"] == "None"
    assert results["new"] == [(1, 40), (0, 41), (2, 41)]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("changed", "JoinError: piece 0 from old does not match its digest; join again"),
        ("not json", "ExchangeError: old sent no PieceHeader that can be read (Invalid JSON"),
        ("a list", "ExchangeError: old sent no PieceHeader that can be read (Input should be"),
        ("too much", "ExchangeError: old announces 1114113 B for piece 0, which has 1114112 B"),
    ],
)
def test_what_a_donor_sends_is_checked(what: str, reason: str) -> None:
    def old(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            group = link(store, "old")
            asked = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            group.receive(asked, "new", 1).poll(LIMIT)
            body = b"x" * 64
            good = {"piece": 0, "tick": 3, "codec": "", "bytes": len(body), "sha256": "0" * 64}
            text = {
                "changed": json.dumps(good),
                "not json": "{",
                "a list": "[]",
                "too much": json.dumps({**good, "bytes": (1 << 20) + BESIDE_TENSORS + 1}),
            }[what]
            header = torch.frombuffer(
                bytearray(text.encode().ljust(HEADER_BYTES)), dtype=torch.uint8
            )
            group.send(header, "new", 1).poll(LIMIT)
            if what == "changed":
                data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
                group.send(data, "new", 2).poll(LIMIT)
            until(lambda: store.kv_check(["done"]))
            return "sent"

        return go

    def new(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            try:
                fetch(lambda: link(store, "new"), "old", ["0" * 64], [1 << 20], lambda _: None)
                return "accepted"
            except DilocoxError as error:
                return f"{type(error).__name__}: {error}"
            finally:
                store.kv_set("done", b"")

        return go

    with shared_store() as store:
        results = run_each({"old": old(store), "new": new(store)})
    assert results["new"].startswith(reason)


# --- anything may come from a peer ---

digests = st.text("0123456789abcdef", min_size=64, max_size=64)
headers = st.fixed_dictionaries(
    {
        "piece": st.integers(-2, 5) | st.just("0"),
        "tick": st.integers(-1, 1 << 60),
        "codec": st.text(max_size=80),
        "bytes": st.integers(-1, 1 << 40) | st.floats(),
        "sha256": digests | st.text(max_size=70),
    },
    optional={"more": st.none()},
)


@given(st.binary(max_size=200) | headers.map(lambda h: json.dumps(h).encode()))
def test_a_header_is_read_or_refused(data: bytes) -> None:
    for kind in (Held, PieceHeader, AckHeader):
        with contextlib.suppress(ExchangeError):
            found = read_header(kind, data.ljust(HEADER_BYTES), "old")
            if isinstance(found, PieceHeader):
                check_header(found, "old", {0, 2}, [100, 100, 100])
                assert found.piece in (0, 2)
                assert found.bytes <= 100 + BESIDE_TENSORS


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_a_body_is_read_or_refused(rest: bytes, length: int) -> None:
    for body in (rest, length.to_bytes(8, "little") + rest, len(rest).to_bytes(8, "little") + rest):
        said = PieceHeader(
            piece=1, tick=0, codec="", bytes=len(body), sha256=hashlib.sha256(body).hexdigest()
        )
        with contextlib.suppress(JoinError):
            assert isinstance(read_body(body, said, "old"), dict)


def test_a_receiver_of_another_number_of_pieces_is_refused() -> None:
    def old(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            donor = Donor(lambda: link(store, "old"), "new", 2, LIMIT)
            assert until(lambda: donor.done)
            store.kv_set("done", b"")
            return str(donor.failure)

        return go

    def new(store: MemoryStore) -> Callable[[], str]:
        def go() -> str:
            header = json.dumps({"anchors": ["0" * 64], "here": []}).encode().ljust(HEADER_BYTES)
            group = link(store, "new")
            group.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), "old", 1)
            until(lambda: store.kv_check(["done"]))
            return "sent"

        return go

    with shared_store() as store:
        results = run_each({"old": old(store), "new": new(store)})
    assert results["old"] == "new has 1 pieces, this site has 2"
