"""The coordinator's machine loses power: of its log only the flushed events are left."""

from __future__ import annotations

import base64
import sqlite3
from pathlib import Path

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.event_log import NAME
from dilocox.coordinator.server.refusals import Caller
from tests.support.coordinator_driver import Driver, run_config

pytestmark = pytest.mark.waits

KEY = m.ExchangeKey.outer(0, 0, 0)


def cut_power(driver: Driver) -> None:
    """Lose all events after the last flushed one, and start the coordinator again."""
    with sqlite3.connect(driver.folder / NAME) as database:
        lost = "DELETE FROM events WHERE number > ?"
        database.execute(lost, (driver.core.log.flushed,))
    database.close()
    driver.reopen()


def begun(driver: Driver) -> None:
    """All sites have begun an exchange, and have been told to send their payloads."""
    driver.start()
    driver.plan(0, "a")
    for site in "abc":
        reply = driver.begin(KEY, site)
    assert not reply.waiting_for


def test_ranks_vote_on_an_exchange_that_they_have_begun(driver: Driver) -> None:
    """They do not begin it again, since they have its group and its payloads."""
    begun(driver)
    cut_power(driver)
    assert driver.vote(KEY, "a", held=list("abc")).decision == "wait"
    cut_power(driver)
    # A vote is sent until there is a decision.
    replies = [driver.vote(KEY, site, held=list("abc")) for site in "abc"]
    assert [reply.decision for reply in replies] == ["wait", "wait", "commit"]
    assert replies[-1].set == ["a", "b", "c"]


def test_a_broken_link_is_reported_of_an_exchange_that_has_begun(driver: Driver) -> None:
    begun(driver)
    cut_power(driver)
    assert driver.vote(KEY, "a", broken=True, failed=["b"]).decision == "repeat"
    cut_power(driver)
    assert [driver.begin(KEY, site).attempt for site in "abc"] == [2, 2, 2]


def test_a_decision_that_one_rank_has_heard_stands(driver: Driver) -> None:
    """That rank has landed the exchange, and votes no more."""
    begun(driver)
    driver.vote(KEY, "b", held=["a", "b"])
    driver.vote(KEY, "c", held=["a", "b"])
    heard = driver.vote(KEY, "a", held=["a", "b"])
    assert (heard.decision, heard.set) == ("commit", ["a", "b"])
    cut_power(driver)
    for site in "bc":
        reply = driver.vote(KEY, site, held=list("abc"))
        assert (reply.decision, reply.set) == ("commit", ["a", "b"])


def test_a_set_over_which_ranks_average_stands(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config(outer={"exchange": "reduce"}))
    begun(driver)
    replies = [driver.vote(KEY, site, held=list("abc")) for site in "abc"]
    assert replies[-1].decision == "average"
    cut_power(driver)
    replies = [driver.vote(KEY, site, held=list("abc"), phase="done") for site in "abc"]
    assert [reply.decision for reply in replies] == ["wait", "wait", "commit"]
    driver.core.close()


def test_ranks_that_are_ready_do_not_say_so_again(driver: Driver) -> None:
    driver.enrol_all()
    driver.ready("a")
    cut_power(driver)
    driver.ready("b")
    driver.ready("c")
    assert driver.core.state.phase == "running"


def test_a_donor_announces_itself_to_an_entering_site_once(driver: Driver) -> None:
    """The entering rank waits for the donor's key as long as the donor stays the same."""
    driver.enrol_all()
    key = "run/entry/b/1/a/0/0/donor/a"
    request = m.StoreSetRequest(key=key, value=base64.b64encode(b"").decode())
    driver.core.store.set(request, Caller("a", driver.incarnations["a"]))
    cut_power(driver)
    assert driver.core.store.check(m.StoreCheckRequest(keys=[key])).present


def test_a_report_of_a_round_stands_for_earlier_ones_that_are_lost(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    driver.plan(1, "a")
    driver.round_done("a", 0)
    cut_power(driver)
    assert driver.core.state.sites["a"].rounds_done == 0
    for site in "abc":
        driver.round_done(site, 1)
    assert driver.plan(2, "a") is not None
    assert driver.core.state.sites["a"].rounds_done == 2
