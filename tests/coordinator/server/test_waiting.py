"""Who waits at the coordinator for the others to be there for an exchange, and for how long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.verdicts import RankVote
from tests.support.served_run import Run
from tests.support.thread_sites import until

pytestmark = pytest.mark.waits

OUTER = m.ExchangeKey.outer


def test_all_are_waited_for_however_long_that_takes(run: Run) -> None:
    """Rounds may be far apart: no limit of this client's is one of the others' training."""
    clients = run.start()
    clients["a"].plan(0)
    key, calls = OUTER(0, 0, 0), list[int]()

    def later() -> float:
        calls.append(0)
        return 1e4 * len(calls)  # hours between any two looks

    limits = replace(run.core.timeouts, poll=0.02)
    rank = m.RankId(site="a", stage=0, shard=0)
    patient = CoordinatorClient(run.url, run.identities["a"], limits, rank, now=later)
    run.clients.append(patient)
    with ThreadPoolExecutor(3) as pool:
        begun = pool.submit(patient.begin, key)
        assert until(lambda: len(calls) > 10)
        assert not begun.done()
        assert clients["b"].begin(key).attempt == begun.result(20).attempt == 1
        vote = pool.submit(patient.vote, key, 1, RankVote(held=["a", "b"]))
        before = len(calls)
        assert until(lambda: len(calls) > before + 10)
        assert not vote.done()
        clients["b"].vote(key, 1, RankVote(held=["a", "b"]))
        assert vote.result(20).set == ["a", "b"]


def test_who_dies_is_not_waited_for(run: Run) -> None:
    clients = run.start()
    clients["a"].plan(0)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(clients["a"].begin, OUTER(0, 0, 0))
        assert until(lambda: OUTER(0, 0, 0).text in run.core.state.exchanges)
        clients["b"].leave("power cut", failed=True)
        assert [member.site for member in begun.result(20).members] == ["a"]


def test_one_that_enters_waits_until_all_who_vote_are_there(tmp_path: Path) -> None:
    """It begins as soon as there is a plan, and payloads come at the boundary."""
    run = Run(tmp_path, "abc", wait_for=2)
    try:
        for site in "ab":
            run.enrol(site)
        clients = {site: run.client(site) for site in "ab"}
        for client in clients.values():
            client.ready()
        run.enrol("c")
        clients["c"] = run.client("c")
        assert clients["c"].beat(0, 0, 0).role == "entering"
        clients["a"].plan(0)
        with ThreadPoolExecutor(2) as pool:
            entering = pool.submit(clients["c"].begin, OUTER(0, 0, 0))
            first = pool.submit(clients["a"].begin, OUTER(0, 0, 0))
            assert until(lambda: len(run.core.arrivals.present(OUTER(0, 0, 0).text)) == 2)
            assert not entering.done()
            assert not first.done()
            members = clients["b"].begin(OUTER(0, 0, 0)).members
            assert [member.role for member in members] == ["member", "member", "entering"]
            assert entering.result(20).members == first.result(20).members == members
    finally:
        run.close()
