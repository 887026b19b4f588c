"""A standby's copy, what waits for it, and coordinators of several generations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.enrolment import hand_in
from dilocox.coordinator.client.errors import CoordinatorError, CoordinatorUnreachableError
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.standby_messages import Copied, FollowRequest, Position
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.generations import Generations, refuse_fenced
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.standby import CLOSE_BYTES, HeldBack, StandbyLink
from dilocox.errors import SupersededError, TrainingError
from dilocox.record.log import statements as s
from dilocox.record.log.verdict_statements import HandedIn
from dilocox.record.writer.notary import TransparencyLogSink
from dilocox.training.launch.standby import StandbyCopy, _end_first
from tests.support.coordinator_driver import run_config
from tests.support.served_run import Run

pytestmark = pytest.mark.waits


def event(number: int, soft: bool = False) -> e.Event:
    """An event that is flushed at once, or one that may be lost."""
    if soft:
        return e.Reported(float(number), "a", number, "round", {})
    return e.Created(float(number), "digest", f"run{number}")


class Pair:
    """A coordinator's log and a standby's copy, without a network."""

    def __init__(self, root: Path, patience: float = 0.02) -> None:
        self.first, self.second, self.said = root / "first", root / "second", list[str]()
        self.log = EventLog(self.first / "coordinator")
        (self.first / "record").mkdir()
        self.link = StandbyLink(self.first, patience, self.said.append)
        self.copy = StandbyCopy(self.second)
        self.loop = asyncio.new_event_loop()

    def append(self, soft: bool = False, lines: int = 1) -> None:
        self.write(*(f'"{self.log.last} {n}"' for n in range(lines)))
        self.log.append(event(self.log.last + 1, soft))

    def write(self, *lines: str) -> None:
        """Statements without an event."""
        with (self.first / "record" / "statements.jsonl").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    @property
    def records(self) -> list[bytes]:
        """The statements here and there."""
        paths = (each / "record" / "statements.jsonl" for each in (self.first, self.second))
        return [path.read_bytes() if path.exists() else b"" for path in paths]

    def ask(self) -> None:
        """One request of the standby, and what it does with the reply."""
        self.link.took("s", self.copy.copied, self.log)
        self.copy.take(self.link.reply(self.copy.copied, self.log, 1, over=False))

    def settled(self) -> None:
        self.loop.run_until_complete(self.link.settled(self.log))

    def reopen(self) -> None:
        self.copy.close()
        self.copy = StandbyCopy(self.second)

    def close(self) -> None:
        self.copy.close()
        self.log.close()
        self.loop.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["hard", "soft", "line", "ask", "settle", "restart"]), max_size=30))
def test_the_copy_is_a_prefix_and_nothing_is_told_before_it_is_there(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    pair = Pair(tmp_path_factory.mktemp("pair"), patience=0.001)
    try:
        for step in steps:
            if step in ("hard", "soft"):
                pair.append(step == "soft", lines=2)
            elif step == "line":
                pair.write('"alone"')
            elif step == "ask":
                pair.ask()
            elif step == "restart":
                pair.reopen()
            else:
                pair.settled()
                # A caller that now gets its reply knows nothing that the standby lacks.
                first, second = pair.records
                same = (pair.copy.log.last, second) == (pair.log.last, first)
                assert same or not pair.link.in_step
            rows, copied = pair.log.rows(0, 99), pair.copy.log.rows(0, 99)
            assert copied == rows[: len(copied)]
        pair.ask()
        pair.ask()
        assert pair.copy.log.rows(0, 99) == pair.log.rows(0, 99)
        first, second = pair.records
        assert first == second
        assert pair.copy.copied.statements == first.count(b"\n")
    finally:
        pair.close()


def test_a_standby_that_hangs_holds_replies_up_once(pair: Pair) -> None:
    pair.append()
    pair.ask()
    pair.ask()
    assert pair.said == [
        "a standby is in step: it has all events and statements on its disk before a site is told"
    ]
    pair.append()
    pair.settled()
    assert not pair.link.in_step
    assert pair.said[1].startswith("the standby did not take event 2 within 0.02 s: the run goes")
    pair.link._patience = 5.0
    began = time.monotonic()
    for _ in range(20):
        pair.append()
        pair.settled()
    assert time.monotonic() - began < 5.0
    assert len(pair.said) == 2
    pair.ask()
    pair.ask()
    assert pair.said[2].startswith("a standby is in step")


def test_a_reply_waits_until_the_standby_has_it(pair: Pair) -> None:
    async def course() -> list[str]:
        order = []

        async def caller() -> None:
            await pair.link.settled(pair.log)
            order.append("reply")

        pair.link._patience = 20.0
        callers = [asyncio.create_task(caller()) for _ in range(3)]
        await asyncio.sleep(0)
        pair.ask()
        order.append("copied")
        await asyncio.sleep(0)
        assert order == ["copied"]
        pair.ask()
        await asyncio.gather(*callers)
        return order

    pair.append()
    pair.ask()
    pair.append()
    assert pair.loop.run_until_complete(course()) == ["copied", "reply", "reply", "reply"]


def test_a_statement_without_an_event_is_waited_for_too(pair: Pair) -> None:
    pair.append()
    pair.ask()
    pair.ask()
    awaited: list[int] = []
    pair.link.on_awaited = lambda: awaited.append(1)
    pair.settled()
    assert awaited == [], "nothing is lacking"
    pair.write('"alone"')
    pair.settled()
    assert awaited == [1], "the standby's request is answered at once"
    assert not pair.link.in_step
    assert pair.said[1].startswith("the standby did not take the record's last statements within ")
    # Without a standby in step nobody waits.
    pair.write('"alone"')
    pair.settled()
    assert awaited == [1]


def test_a_standby_that_lacks_much_of_the_record_is_not_waited_for(pair: Pair) -> None:
    pair.append()
    pair.write('"' + "x" * CLOSE_BYTES + '"')
    pair.link.took("s", pair.copy.copied, pair.log)
    assert not pair.link.in_step
    pair.ask()
    pair.ask()
    assert pair.link.in_step


def test_what_is_no_copy_of_this_run_is_refused(pair: Pair, tmp_path: Path) -> None:
    for _ in range(3):
        pair.append()
    pair.ask()
    good = pair.copy.copied
    pair.link.took("s", good, pair.log)
    other = "0" * 64
    for change in (
        {"events": 9}, {"event_digest": other}, {"events": 2}, {"record_digest": other},
        {"record": good.record - 1}, {"record": 0}, {"record": good.record + 5},
    ):  # fmt: skip
        with pytest.raises(Refused, match="not the beginning of this run's log"):
            pair.link.took("s", good.model_copy(update=change), pair.log)
    with pytest.raises(Refused, match="another standby follows"):
        pair.link.took("t", good, pair.log)
    with pytest.raises(TrainingError, match="do not follow event 3"):
        pair.copy.log.copy([(5, 1.0, "Created", "{}")])
    # A line that a crash has cut is no part of the copy.
    pair.copy.close()
    with (pair.second / "record" / "statements.jsonl").open("a") as file:
        file.write('"torn')
    pair.copy = StandbyCopy(pair.second)
    assert pair.copy.copied == good


def test_a_checkpoint_is_published_when_the_standby_has_its_statements(pair: Pair) -> None:
    published: list[str] = []

    class Publisher:
        def take(self, checkpoint: str) -> None:
            published.append(checkpoint)

    held = HeldBack(Publisher(), pair.link, int)
    held.take("1")
    pair.append()
    pair.ask()
    held.take("1")
    assert published == ["1"]
    held.take("2")
    assert published == ["1"]
    pair.ask()
    assert published == ["1"], "the newest one alone, and not before its statements"
    pair.append()
    pair.ask()
    pair.ask()
    assert published == ["1", "2"]
    held.take("9")
    pair.append()
    pair.settled()  # The standby is given up, and publishing does not wait for it.
    assert published == ["1", "2", "9"]


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 5), st.integers(0, 40))
def test_what_a_position_says(parts: list[int], generation: int, number: int) -> None:
    generations = Generations(Path("nowhere"))
    generations.begun = [0, *parts]
    last = 20
    seen = Position.parse(Position(generation, number, "0" * 64).text)
    assert seen == Position(generation, number)
    standing = generations.standing(seen, last)
    assert (standing == "fenced") == (generation > len(parts) + 1)
    if standing != "fenced":
        end = 99 if not generation else [*parts, last][generation - 1]
        assert (standing == "behind") == (number > end)


def test_positions_that_are_none() -> None:
    seal = "0" * 64
    for text in (None, "", "1", "1 2", f"-1 2 {seal}", f"a b {seal}", f"1 {'9' * 30} {seal}",
                 f"1 2 {seal}0", f"1 2 {seal[:-1]}G"):  # fmt: skip
        assert Position.parse(text) == Position()


def test_generations_are_kept(tmp_path: Path) -> None:
    Generations(tmp_path).begin(3, 40)
    again = Generations(tmp_path)
    assert (again.current, again.begun, again.over) == (3, [0, 40, 40], False)
    refuse_fenced(tmp_path)
    again.end()
    with pytest.raises(TrainingError, match="a standby has taken over"):
        refuse_fenced(tmp_path)
    (tmp_path / "generations.json").write_text("{}")
    with pytest.raises(TrainingError, match="put it back from a copy"):
        Generations(tmp_path)


# --- over real TLS ------------------------------------------------------------------------------


def operator(run: Run) -> CoordinatorClient:
    identity = Identity.load(run.core.authority.operator_path)
    made = CoordinatorClient(run.url, identity, run.core.timeouts)
    run.clients.append(made)
    return made


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "first"
    link = StandbyLink(folder, 5.0, lambda line: None)
    run = Run(folder / "coordinator", standby=link)
    yield run
    run.close()


def second_of(first: Run, tmp_path: Path) -> Path:
    """The standby's folder, with the keys that the operator copies."""
    folder = tmp_path / "second"
    (folder / "coordinator").mkdir(parents=True)
    for name in ("authority.pem", "server.pem", "operator.json", "token-secret"):
        shutil.copy2(first.folder / name, folder / "coordinator" / name)
    return folder


def test_a_move_to_the_standby_ends_the_first_and_sites_go_on(first: Run, tmp_path: Path) -> None:
    clients = first.start()
    folder = second_of(first, tmp_path)
    copy = StandbyCopy(folder)
    with pytest.raises(CoordinatorError, match="is not the operator's standby"):
        clients["a"].send(FollowRequest(name="x", copied=copy.copied))
    _end_first(operator(first), copy, 2)
    assert isinstance(first.server.standby.error, SupersededError)
    assert copy.log.rows(0, 999) == first.core.log.rows(0, 999)
    number = copy.log.last
    copy.close()
    Generations(folder / "coordinator").begin(2, number)
    # The first sends nothing any more, whoever asks.
    quick = first.client("a", now=clock(), sleep=lambda seconds: None)
    with pytest.raises(CoordinatorUnreachableError, match="status 503"):
        quick.beat(0, 0, 0)
    assert json.loads((first.folder / "generations.json").read_text())["over"]
    second = Run(folder / "coordinator")
    try:
        both = f"{first.url},{second.url}"
        roaming = CoordinatorClient(
            both, first.identities["a"], first.core.timeouts, clients["a"].rank,
            sleep=lambda seconds: None,
        )  # fmt: skip
        second.clients.append(roaming)
        first.call(first.server.stop())
        assert roaming.beat(0, 0, 0).role == clients_role(second, "a")
        assert roaming._transport._seen.generation == 2
    finally:
        second.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Run]:
    """A run with a record, whose rounds are audited."""
    folder = tmp_path / "first"
    sections: dict[str, Any] = {"run": {"folder": str(folder)}, "record": {"states_every": 1}}
    config = run_config("ab", **sections)
    notary = TransparencyLogSink.open(config, folder / "coordinator", print)
    link = StandbyLink(folder, 20.0, lambda line: None)
    run = Run(folder / "coordinator", standby=link, config=config, notary=notary)
    yield run
    run.close()
    notary.close()


@contextlib.contextmanager
def following(run: Run, copy: StandbyCopy, writing: float) -> Iterator[None]:
    """A standby in step, in a thread; it takes `writing` seconds to write a reply down."""
    client, ended = operator(run), threading.Event()

    def ask(wait: float) -> None:
        reply = client.send(FollowRequest(name=copy.name, copied=copy.copied, wait=wait))
        if reply.content:
            time.sleep(writing)
        copy.take(reply)

    def follow() -> None:
        while not ended.is_set():
            ask(2.0)

    ask(0.0)
    ask(0.0)
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_statement_without_an_event_outlives_the_first_coordinator(
    kept: Run, tmp_path: Path
) -> None:
    """If the first is killed after a reply, its statement is on the standby's disk."""
    kept.start()["a"].plan(0)
    link, record = kept.standby, Path("record") / "statements.jsonl"
    assert link is not None
    folder = second_of(kept, tmp_path)
    copy, auditor = StandbyCopy(folder), s.Signer.from_hex("0a" * 32)
    with following(kept, copy, writing=0.1):
        last, began = kept.core.log.last, time.monotonic()
        for number in range(6):
            said = HandedIn("b", 0, "EXACT", auditor.public, "a", f"{number}" * 64, 1, 1)
            statement = auditor.sign(said.statement(kept.core.witness.run))
            hand_in(kept.url, kept.token("a"), kept.core.timeouts, statement)
            # The disk as it is now: the first may be killed at any moment from here on.
            assert s.opened((folder / record).read_text().splitlines()[-1])[0].kind == s.VERDICT
            assert (folder / record).read_bytes() == (kept.config.folder / record).read_bytes()
        took = time.monotonic() - began
        assert (kept.core.log.last, link.in_step) == (last, True), "these have no event"
    assert took < 8.0, "the standby was told at once, not when its request had waited for long"
    copy.close()


def test_nobody_waits_for_a_standby_that_has_all_of_a_run_that_has_ended(
    first: Run, tmp_path: Path
) -> None:
    """Sites that send their last reports would wait for it in vain: it asks no more."""
    clients = first.start()
    copy, asking, link = StandbyCopy(second_of(first, tmp_path)), operator(first), first.standby
    assert link is not None

    def ask() -> None:
        copy.take(asking.send(FollowRequest(name=copy.name, copied=copy.copied)))

    ask()

    async def fail() -> None:
        rank = clients["a"].rank
        first.core.departures.fail(m.FailRequest(rank=rank, reason="for a test"))

    first.call(fail())
    ask()
    assert link.in_step
    ask()
    assert not link.in_step
    copy.close()


def sealed(run: Run, generation: int, number: int) -> Position:
    """A position as the run's coordinators say it."""
    return Position(generation, number, run.core.tokens.seal(f"{generation} {number}"))


def test_two_standbys_do_not_follow_one_run(first: Run, tmp_path: Path) -> None:
    """And nobody is told that a coordinator which refuses has ended."""
    first.start()
    copies = [StandbyCopy(second_of(first, tmp_path / name)) for name in "xy"]
    asking = operator(first)
    asking.send(FollowRequest(name=copies[0].name, copied=copies[0].copied))
    with pytest.raises(CoordinatorError, match="another standby follows this run"):
        _end_first(asking, copies[1], 2)
    assert first.server.standby.error is None
    # The one that follows takes over while sites write on, whatever comes in between.
    told = first.server.standby.check
    _end_first(asking, copies[0], 2)
    assert isinstance(first.server.standby.error, SupersededError)
    with pytest.raises(SupersededError):
        told(Position())
    for each in copies:
        each.close()


def clients_role(run: Run, site: str) -> str:
    return run.core.state.sites[site].role


def clock(step: float = 30.0) -> Any:
    """A clock that runs by itself, so that retries end soon."""
    times = iter(range(10**6))
    return lambda: step * next(times)


def test_a_site_that_has_met_a_newer_coordinator_ends_an_older_one(first: Run) -> None:
    clients = first.start()
    # A member that makes a position up ends nobody.
    for seal in ("", "0" * 64, first.core.tokens.seal("2 4")):
        clients["a"]._transport._seen = Position(2, 5, seal)
        first.server.standby.check(clients["a"]._transport._seen)
    assert first.server.standby.error is None
    clients["a"]._transport._seen = sealed(first, 2, 5)
    clients["a"]._transport._now = clock()
    with pytest.raises(CoordinatorUnreachableError):
        clients["a"].beat(0, 0, 0)
    assert "generation 2" in str(first.server.standby.error)
    assert Generations(first.folder).over


def test_a_log_that_lacks_what_a_site_has_seen_decides_nothing(first: Run) -> None:
    clients = first.start()
    last = first.core.log.last
    clients["a"].beat(0, 0, 0)
    seen = clients["a"]._transport._seen
    assert seen == Position(1, first.core.log.flushed)
    clients["a"]._transport._seen = sealed(first, 1, last + 100)
    clients["a"]._transport._now = clock()
    with pytest.raises(CoordinatorUnreachableError):
        clients["a"].beat(0, 0, 0)
    assert "lacks events that a site has seen" in str(first.server.standby.error)
    assert not Generations(first.folder).over


def test_replies_of_an_earlier_generation_do_not_count(first: Run) -> None:
    clients = first.start()
    clients["a"]._transport._seen = sealed(first, 2, 0)
    first.server.standby._generations.standing = lambda *_: ""  # type: ignore[method-assign]
    clients["a"]._transport._now = clock()
    with pytest.raises(CoordinatorUnreachableError, match="an earlier coordinator answers"):
        clients["a"].beat(0, 0, 0)


def test_soft_events_that_a_power_cut_takes_are_not_missed(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for number, soft in enumerate((False, True, False, True, True), 1):
        log.append(event(number, soft))
    assert (log.last, log.flushed) == (5, 3)
    log.close()
    log = EventLog(tmp_path)
    assert (log.last, log.flushed) == (5, 3)
    log.close()


def test_an_empty_copy() -> None:
    empty = Copied(events=0, event_digest="", record=0, statements=0, record_digest="", metrics=0)
    assert FollowRequest(name="a", copied=empty).server_wait == 0.0
