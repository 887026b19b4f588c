"""What one member may ask and keep; the others do not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dilocox.coordinator.client.errors import CoordinatorError
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.custody_messages import CustodyRequest
from dilocox.coordinator.server import budgets
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.refusals import Caller, Refused
from tests.support.coordinator_driver import Clock, Driver, replayed, run_config
from tests.support.served_run import Run

pytestmark = pytest.mark.waits

A, B = Caller("a", 1), Caller("b", 1)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path, run_config("ab"))
    made.start()
    made.plan(0, "a")
    yield made
    assert replayed(made) == made.core.state
    made.core.close()


def until_refused(act: Callable[[int], object], most: int = 400) -> tuple[int, Refused]:
    """How often something may be done, and what is said then."""
    for number in range(most):
        try:
            act(number)
        except Refused as refused:
            return number, refused
    raise AssertionError("nothing was refused")


def put(driver: Driver, caller: Caller, key: str, value: str = "AAAA") -> None:
    driver.core.store.set(m.StoreSetRequest(key=key, value=value), caller)


@pytest.mark.parametrize("prefix", ["run", "site/a", "epoch/1"])
def test_18000_keys_of_one_member_leave_the_others_theirs(two: Driver, prefix: str) -> None:
    count, refused = until_refused(lambda number: put(two, A, f"{prefix}/{number}"))
    assert (count, refused.kind) == (budgets.KEYS, "quota")
    assert str(refused).endswith("has 256 others; delete some first")
    for number in range(count, 18_000):
        with pytest.raises(Refused):
            put(two, A, f"{prefix}/{number}")
    for number in range(100):
        put(two, B, f"epoch/1/group/{number}")
    put(two, B, "run/entry/b/x")
    # The same again is no news, and who deletes has room.
    put(two, A, f"{prefix}/0")
    two.plan(1, "a")
    assert two.core.store.delete(m.StoreDeleteRequest(key=f"{prefix}/0"), A).deleted
    put(two, A, f"{prefix}/again")


def test_bytes_of_values_are_counted_and_so_is_what_was_replaced(two: Driver) -> None:
    large = "A" * 80_000
    for number in range(13):
        put(two, A, f"epoch/1/{number}", large)
    with pytest.raises(Refused, match="1048576 bytes, and has 13 others"):
        put(two, A, "epoch/1/13", large)
    put(two, A, "epoch/1/0", "A")
    put(two, A, "epoch/1/13", large)
    put(two, B, "epoch/1/b", large)


def test_a_lasting_key_is_not_changed_again_and_again(two: Driver) -> None:
    count, refused = until_refused(lambda number: put(two, A, "run/x", f"{number:04}"))
    assert count == budgets.EVENTS["lasting keys"]
    assert "lasting keys since the last plan" in str(refused)
    put(two, B, "run/y")
    two.plan(1, "a")
    put(two, A, "run/x")


def test_nobody_changes_another_site_s_key(two: Driver) -> None:
    for key in ("epoch/1/x", "run/x"):
        put(two, A, key)
        with pytest.raises(Refused, match=f"key {key}: only site a, which has set it"):
            put(two, B, key, "BBBB")
        with pytest.raises(Refused, match="only site a"):
            two.core.store.delete(m.StoreDeleteRequest(key=key), B)
    two.reopen()
    with pytest.raises(Refused, match="only site a"):
        put(two, B, "run/x", "BBBB")


def test_nobody_is_first_at_another_site_s_key(two: Driver) -> None:
    """Sites meet under keys that end with their names; who finds its own taken cannot meet."""
    for key in ("epoch/1/0123abcd/0/0/a", "run/entry/a/1/0/0/b/0/0/a", "site/b/a"):
        with pytest.raises(Refused, match=f"key {key}: only site a, whose name it has, sets it"):
            put(two, B, key)
    put(two, A, "epoch/1/0123abcd/0/0/a")
    put(two, B, "epoch/1/0123abcd/0/0/b")


def test_a_full_store_still_deletes_and_sums_go_with_their_keys(
    two: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = two.core.store
    for number in range(600):
        store.add(m.StoreAddRequest(key="run/n", amount=0, nonce=f"{number:016x}"), A)
    assert len(store._sums["a"]) == 256
    monkeypatch.setattr("dilocox.coordinator.server.kv_store.MAX_KEYS", 1)
    with pytest.raises(Refused, match="the store is full"):
        put(two, B, "epoch/1/x")
    assert store.delete(m.StoreDeleteRequest(key="run/n"), A).deleted
    assert store._sums == {"a": {}}
    put(two, B, "epoch/1/x")


def report(driver: Driver, site: str, round_: int, text: str, kind: m.ReportKind) -> None:
    rank = driver.check(m.RankId(site=site, stage=0, shard=0))
    driver.core.report(m.ReportRequest(rank=rank, round=round_, kind=kind, metrics={"text": text}))


def test_200_reports_of_900_kb_are_refused(two: Driver) -> None:
    before = two.core.log.path.stat().st_size
    for number in range(200):
        with pytest.raises(Refused, match="its report of round 0 has 9000"):
            report(two, "a", 0, f"{number:03}" + "x" * 900_000, "warning")
    assert two.core.log.path.stat().st_size == before
    report(two, "b", 0, "x" * 10_000, "warning")
    assert two.core.state.sites["b"].metrics["warning"]["round"] == 0


def test_warnings_that_differ_have_an_end(two: Driver) -> None:
    count, refused = until_refused(lambda number: report(two, "a", 0, f"{number}", "warning"))
    assert (count, refused.kind) == (budgets.EVENTS["warnings"], "quota")
    assert str(refused).startswith("site a: has used up its 32 warnings since the last plan")
    report(two, "b", 0, "another", "warning")
    two.plan(1, "a")
    report(two, "a", 0, "one more", "warning")


def test_a_report_of_long_ago_is_taken_and_not_kept(two: Driver) -> None:
    two.core.state.next_round = 20
    for round_ in (3, 13):
        report(two, "a", round_, "", "round")
    assert two.core.state.sites["a"].metrics["round"]["round"] == 13
    report(two, "b", 3, "", "round")
    assert "round" not in two.core.state.sites["b"].metrics
    two.core.state.next_round = 1


def test_checkpoints_that_there_are_not_have_an_end(
    two: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(budgets.EVENTS, "checkpoints", 2)
    _, refused = until_refused(lambda tick: two.write_checkpoint("a", tick, 0, tick))
    assert "checkpoints since the last plan" in str(refused)
    assert len(two.core.state.checkpoints) == budgets.EVENTS["checkpoints"]
    two.write_checkpoint("b", 0, 0, 0)


@pytest.mark.parametrize("place", [(0, 1), (1, 1), (9, 0), (0, 4)])
def test_no_site_places_a_checkpoint_where_no_plan_has_it(
    two: Driver, place: tuple[int, int]
) -> None:
    """The first to name a slot would keep all others from writing there."""
    plan = two.core.state.plans[0]
    end = plan.first_tick + plan.slots
    with pytest.raises(Refused, match=f"a stage 0 shard 0 places it in round {place[0]} slot"):
        two.write_checkpoint("a", end, *place)
    for site in "ba":
        two.write_checkpoint(site, end, 1, 0)
    assert two.core.state.checkpoints[end].sites == ["a", "b"]


def test_signed_states_have_an_end(two: Driver) -> None:
    rank = two.check(m.RankId(site="a", stage=0, shard=0))
    said = m.StateRequest(rank=rank, statement="x")
    count, refused = until_refused(lambda _: two.core.saves.state(said))
    assert count == budgets.EVENTS["signed states"]
    assert "signed states since the last plan" in str(refused)


def test_signed_pieces_have_an_end_and_keep_no_state_from_the_log(two: Driver) -> None:
    rank = two.check(m.RankId(site="a", stage=0, shard=0))
    said = CustodyRequest(rank=rank, statement="x")
    count, refused = until_refused(lambda _: two.core.saves.custody(said))
    assert count == budgets.EVENTS["signed pieces"]
    assert "signed pieces since the last plan" in str(refused)
    two.core.saves.state(m.StateRequest(rank=rank, statement="x"))


def test_requests_and_bytes_come_back_with_time() -> None:
    clock = Clock()
    spent = Budgets(2, clock)
    for _ in range(4000):
        spent.charge(A)
    with pytest.raises(Refused, match="site a: asks for more than 200 requests or 2 MiB") as busy:
        spent.charge(A)
    assert busy.value.kind == "busy"
    spent.charge(B)
    spent.charge(Caller("operator", 0))
    clock.time += 1.0
    for _ in range(200):
        spent.charge(A)
    with pytest.raises(Refused, match="asks for more"):
        spent.charge(A)
    clock.time += 60.0
    for _ in range(64):
        spent.charge(B, 1 << 20)
    with pytest.raises(Refused, match="asks for more"):
        spent.charge(B, 1 << 20)


def test_who_is_busy_tries_again_and_who_has_no_quota_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    with contextlib.closing(run):
        clients = run.start()
        monkeypatch.setattr(budgets, "REQUEST_BURST", 3.0)
        monkeypatch.setattr(budgets, "REQUESTS", 0.0)
        run.core.budgets._left.clear()
        for _ in range(3):
            clients["a"].kv_check(["run/x"])
        answer = run.clients[0]._transport._pool.urlopen(
            "POST", "/v1/kv/check", body=b'{"keys": ["run/x"]}'
        )
        assert answer.status == 429
        assert b"wait, and ask less often" in answer.data
        # Beats are never counted, and the other site has its own.
        clients["a"].beat(0, 0, 0)
        clients["b"].kv_check(["run/x"])
        tried = []

        def sleep(seconds: float) -> None:
            tried.append(seconds)
            run.core.budgets._left.clear()

        monkeypatch.setattr(clients["a"]._transport, "_sleep", sleep)
        clients["a"].kv_check(["run/x"])
        assert len(tried) == 1
        monkeypatch.setattr(budgets, "REQUEST_BURST", 1e6)
        monkeypatch.setattr(budgets, "KEYS", 0)
        with pytest.raises(CoordinatorError, match="site a may have 0 keys"):
            clients["a"].kv_set("run/x", b"")
        assert len(tried) == 1


def test_who_joins_again_and_again_has_to_wait(two: Driver) -> None:
    def again(_: int) -> None:
        two.leave("b")
        two.enrol("b")

    count, refused = until_refused(again)
    assert (count, refused.kind) == (budgets.ENROLMENT_BURST - 1, "busy")
    assert "site b: joins again and again" in str(refused)
    two.clock.time += 2.0
    assert two.enrol("b").incarnation == budgets.ENROLMENT_BURST + 1
