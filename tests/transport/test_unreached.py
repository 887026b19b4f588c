"""A site that cannot be reached: who is blamed, and that the others go on."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.compression import compressor
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import DilocoxError
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.training.builder import RankPlace
from dilocox.training.launch.exchange_backend import LinkBackend
from dilocox.transport.exchange import exchange
from dilocox.transport.exchange_worker import LinkSlot, OrderedLock
from dilocox.transport.groups import EpochChangedError, PeerGroup
from dilocox.transport.link.endpoint import LinkEndpoint
from dilocox.transport.unreached import UnreachedError
from tests.support.exchanging import GEOMETRY, KEY, LENGTH, WEIGHTS, values_of
from tests.support.linked import endpoint_of
from tests.support.served_run import Run
from tests.support.thread_sites import CONTEXT, TIMEOUTS, MemoryStore, run_each, shared_store, until

pytestmark = pytest.mark.waits

HERE = "127.0.0.9"
"""Where sites that can be reached listen."""
BELOW = "127.0.0.5"
"""Where a site's door is closed."""
LIMIT = 60.0


@contextmanager
def closed_door(drops: bool) -> Iterator[int]:
    """A port at `BELOW` that refuses, or one at which packets get lost."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    # In a process of its own: what is connected to the door here would count as a link.
    checkpointer = CONTEXT.Process(target=keep_closed, args=(drops, theirs), daemon=True)
    checkpointer.start()
    try:
        yield int(ours.recv())
    finally:
        checkpointer.kill()
        checkpointer.join()


def keep_closed(drops: bool, pipe: Connection) -> None:
    door, callers = socket.socket(), [socket.socket() for _ in range(3 * drops)]
    door.bind((BELOW, 0))
    if drops:
        door.listen(0)
    for caller in callers:
        caller.setblocking(False)
        caller.connect_ex(door.getsockname())  # fills the queue of those not taken yet
    pipe.send(door.getsockname()[1])
    signal.pause()


def behind(port: int | None, site: str, limits: Timeouts = TIMEOUTS) -> LinkEndpoint:
    """An endpoint that is reached at the closed door, as a site's behind a firewall is."""
    found = endpoint_of(site, HERE, timeouts=limits)
    if port is not None:
        found.host, found.port = BELOW, port
    return found


@pytest.mark.parametrize(
    ("mode", "drops"),
    [
        ("gather", False),
        pytest.param("gather", True, marks=pytest.mark.slow),
        pytest.param("reduce", False, marks=pytest.mark.slow),
        ("reduce", True),
    ],
)
def test_one_that_enters_and_cannot_be_reached_harms_nobody(
    tmp_path: Path, drops: bool, mode: str
) -> None:
    """The others name it, and exchange without it."""
    # In a process of its own: links have threads that no fork of this one would have.
    found = run_each({"all": lambda: entered_in_vain(tmp_path, drops, mode)})["all"]
    assert found == {
        "contributors": [("a", "c"), ("a", "c")],
        "refused": True,
        "roles": {"new": "gone", "a": "active", "c": "active"},
        "phase": "running",
    }


def entered_in_vain(folder: Path, drops: bool, mode: str) -> dict[str, Any]:
    """An exchange of a and c, when a site that has entered cannot be reached."""
    # The site named first connects, and so "new" is connected to.
    run = Run(folder, ["a", "c", "new"], outer={"exchange": mode}, wait_for=2)  # type: ignore[arg-type]
    key = ExchangeKey.outer(0, 0, 0)
    limits = replace(run.core.timeouts, heartbeat=0.2, form=2.0, link=10.0)

    def part(site: str) -> Outcome:
        control: Any = SimpleNamespace(epoch=lambda: run.core.state.epoch)
        endpoint = behind(door if site == "new" else None, site, limits)
        own = LinkBackend(clients[site], control, RankPlace(site, 0, 0), limits, endpoint)
        values = None if site == "new" else values_of({"a": "paris", "c": "lyon"}[site])
        weights = {"a": 1.0, "c": 1.0}
        what = Contribution(key, LENGTH, values, compressor("int8", GEOMETRY), mode, weights)
        return exchange(own, site, what, LinkSlot(OrderedLock(), 0))

    try:
        for site in ("a", "c"):
            run.enrol(site)
        clients = {site: run.client(site) for site in ("a", "c")}
        for client in clients.values():
            client.ready()
        run.enrol("new")
        clients["new"] = run.client("new")
        assert clients["new"].beat(0, 0, 0).role == "entering"
        clients["a"].plan(0)
        with closed_door(drops) as door, ThreadPoolExecutor(3) as pool:
            futures = {site: pool.submit(part, site) for site in ("new", "a", "c")}
            outcomes = [futures[site].result(30.0) for site in ("a", "c")]
            error = futures["new"].exception(30.0)
        return {
            "contributors": [outcome.contributors for outcome in outcomes],
            "refused": isinstance(error, DilocoxError) and "unreachable" in str(error),
            "roles": {site.name: site.role for site in run.core.state.sites.values()},
            "phase": run.core.state.phase,
        }
    finally:
        run.close()


@pytest.mark.parametrize("drops", [False, True], ids=["refuses", "drops"])
def test_who_could_not_be_reached_is_named(drops: bool) -> None:
    limits = replace(TIMEOUTS, dial=0.5)
    with closed_door(drops) as door:

        def site(me: str, store: MemoryStore) -> Callable[[], Any]:
            def go() -> Any:
                # The one named first connects.
                sites, at = ["a", "c", "new"], behind(door if me == "new" else None, me, limits)
                # Nobody's time goes by before all have begun.
                store.kv_set(f"there/{me}", b"")
                store.kv_get([f"there/{site}" for site in sites], LIMIT)
                try:
                    PeerGroup(at, store, "g", sites, 4.0, LIMIT, lambda: False)
                except UnreachedError as error:
                    return error.sites
                return []

            return go

        with shared_store() as store:
            found = run_each({me: site(me, store) for me in ("a", "new", "c")})
    assert all(found[site] == ["new"] for site in ("a", "c"))


def network(me: str, client: Any, control: Any, form: float) -> LinkBackend:
    for name in ("begin", "attempt", "observe", "report_broken"):
        setattr(client, name, None)
    limits = replace(TIMEOUTS, form=form)
    return LinkBackend(
        cast(CoordinatorClient, client), control, RankPlace(me, 0, 0), limits, endpoint_of(me, HERE)
    )


def entering(donor: str) -> Any:
    entry = SimpleNamespace(site="new", donor=donor)
    return SimpleNamespace(epoch=lambda: 1, news=SimpleNamespace(entering=[entry]))


def test_a_receiver_waits_for_its_donor_s_next_slot_end() -> None:
    """For longer than it takes to form a group."""

    def donor(store: MemoryStore) -> Callable[[], Any]:
        def go() -> Any:
            assert not until(lambda: store.kv_check(["formed"]), 1.5)
            network("old", store, entering("old"), 10.0).pair("e", "old", "new")
            return "formed"

        return go

    def receiver(store: MemoryStore) -> Callable[[], Any]:
        def go() -> Any:
            group = network("new", store, entering("old"), 0.5).pair("e", "old", "new")
            store.kv_set("formed", b"")
            return group.sites

        return go

    with shared_store() as store:
        assert run_each({"old": donor(store), "new": receiver(store)}) == {
            "old": "formed", "new": ["old", "new"],
        }  # fmt: skip


def test_a_receiver_does_not_wait_for_who_is_its_donor_no_more() -> None:
    with pytest.raises(EpochChangedError, match="old is no longer the donor"):
        network("new", MemoryStore({}), entering("next"), 10.0).pair("e", "old", "new")


def test_a_group_that_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second exchange would read what the first try has left, and blame whom it finds there."""
    tries: list[float] = []

    def form(*_: Any) -> PeerGroup:
        tries.append(0.0)
        raise UnreachedError("no link", ["b"])

    own = network("a", MemoryStore({}), entering("old"), 1.0)
    own.timeouts = replace(own.timeouts, heartbeat=0.05)
    monkeypatch.setattr(own, "_form", form)
    begun: Any = SimpleNamespace(epoch=1, members=[SimpleNamespace(site=s) for s in WEIGHTS])
    for _ in range(2):
        with pytest.raises(UnreachedError) as raised:
            own.group(begun, lambda: False)
        assert raised.value.sites == ["b"]
    assert len(tries) == 1
    # Who has died is no link's fault: its group is left as soon as that is known.
    begun.epoch = 2
    with pytest.raises(EpochChangedError):
        own.group(begun, lambda: True)


def test_what_is_decided_is_not_waited_for() -> None:
    """One that only receives and comes late: whether it needs it, its landing says."""
    member = SimpleNamespace(site="paris", role="member")
    late = SimpleNamespace(site="oslo", role="entering")
    begun = SimpleNamespace(epoch=1, attempt=2, decided=True, members=[member, late])
    ballot: Any = SimpleNamespace(commit=lambda *_: None, begin=lambda *_: begun, epoch=lambda: 1)
    what = Contribution(KEY, LENGTH, None, compressor("none", GEOMETRY), "gather", WEIGHTS)
    assert exchange(ballot, "oslo", what, LinkSlot(OrderedLock(), 0)).missed
