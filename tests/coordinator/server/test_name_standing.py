"""A member that the operator bans is out of the run, and stays out."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.errors import CoordinatorError
from dilocox.coordinator.identity import OPERATOR, Identity
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.record_keys import RecordKey
from dilocox.coordinator.server import replies
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.snapshots import packed, unpacked
from dilocox.errors import JoinError
from tests.support.coordinator_driver import Driver, numbers, run_config
from tests.support.served_run import Run

pytestmark = pytest.mark.waits

BY = Caller(OPERATOR, 0)
NOBODY_COMES = r"2 of the sites that outer.min_sites = 3 asks for may join, so the run does not"


def change(driver: Driver, site: str, what: str, by: Caller = BY) -> str:
    return driver.core.standings.change(
        m.StandingRequest.model_validate({"site": site, "change": what}), by
    ).text


def test_a_banned_member_goes_and_cannot_come_back(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    for site in "abc":
        driver.write_checkpoint(site, 2, 0, 2)
    token = driver.token("b")
    driver.core.hand_out()
    assert "its join token is void" in change(driver, "b", "ban")
    site = driver.core.state.sites["b"]
    assert (site.role, site.reason) == ("gone", "banned by the operator")
    assert not (driver.folder / "tokens" / "b").exists()
    with pytest.raises(Refused, match=r"site b: gone \(banned by the operator\)"):
        driver.beat("b")
    for go_on in (lambda: None, driver.reopen, lambda: driver.core.resume(), driver.reopen):
        go_on()
        with pytest.raises(Refused, match="site b: banned by the operator") as refused:
            driver.enrol("b", token=token)
        assert refused.value.kind == "join", "it does not try again"
    feed = [text for _, _, _, text in driver.core.state.feed]
    assert "b is banned by the operator" in feed
    shown = {site.site: site for site in replies.status(driver.core.state, 0).sites}
    assert shown["b"].banned
    assert not shown["a"].banned


def test_a_ban_is_taken_back_with_a_new_token_alone(driver: Driver) -> None:
    driver.start()
    token = driver.token("b")
    change(driver, "b", "ban")
    with pytest.raises(Refused, match="b: is banned already"):
        change(driver, "b", "ban")
    assert "only with its new join token: coordinator/tokens/b" in change(driver, "b", "unban")
    for go_on in (lambda: None, driver.reopen):
        go_on()
        with pytest.raises(Refused, match="token: not a token of this run, or no longer valid"):
            driver.enrol("b", token=token)
    handed_out = (driver.folder / "tokens" / "b").read_text().strip()
    assert driver.enrol("b", token=handed_out).incarnation == 2
    with pytest.raises(Refused, match="b: is not banned"):
        change(driver, "b", "unban")


def test_a_snapshot_holds_what_the_operator_has_said(driver: Driver) -> None:
    driver.enrol("a", RecordKey.new())
    for site, what in (("b", "ban"), ("c", "ban"), ("c", "unban")):
        change(driver, site, what)
    state = driver.core.state
    again = unpacked(driver.config, packed(state))
    standings = {name: site.standing for name, site in again.sites.items()}
    assert standings == {name: site.standing for name, site in state.sites.items()}
    assert (standings["b"].banned, standings["c"].token_issue) == (True, 1)
    assert standings["a"].bound_key == state.sites["a"].standing.key != ""


def test_only_the_operator_bans(driver: Driver) -> None:
    driver.start()
    for site, what in (("b", "ban"), ("a", "ban"), ("b", "unban")):
        with pytest.raises(Refused, match="only the operator may"):
            change(driver, site, what, Caller("a", 1))
    with pytest.raises(Refused, match="x: not in the run file, which names: a, b, c"):
        change(driver, "x", "ban")
    assert driver.core.state.admissible == ["a", "b", "c"]


def test_a_run_does_not_wait_for_a_banned_name(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("abc", outer={"min_sites": 2}))
    driver.enrol("a")
    driver.enrol("b")
    assert driver.core.state.phase == "enrolling"
    assert "min_sites" not in change(driver, "c", "ban")
    assert driver.core.state.phase == "starting"
    driver.core.close()


def test_a_run_that_cannot_begin_any_more_says_so(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("abc", outer={"min_sites": 3}))
    driver.enrol("a")
    assert NOBODY_COMES in change(driver, "c", "ban").replace("\n", " ")
    driver.core.close()


def test_what_a_banned_member_was_to_train_on_goes_to_the_others(driver: Driver) -> None:
    driver.start()
    plan = driver.plan(0, "a")
    assert plan is not None
    change(driver, "b", "ban")
    driver.round_done("a", 0)
    driver.round_done("c", 0)
    later = driver.plan(1, "a")
    assert later is not None
    lost = {n for start, count in plan.members["b"].ranges for n in range(start, start + count)}
    assert lost
    assert lost <= set(numbers(later))


def test_over_the_wire(tmp_path: Path) -> None:
    run = Run(tmp_path)
    try:
        clients, old = run.start(), run.token("b")
        identity = Identity.load(run.core.authority.operator_path)
        operator = CoordinatorClient(run.url, identity, run.core.timeouts)
        run.clients.append(operator)
        with pytest.raises(CoordinatorError, match="only the operator may do that"):
            clients["a"].change_standing("b", "ban")
        assert "is out of the run" in operator.change_standing("b", "ban")
        with pytest.raises(JoinError, match="site b: banned by the operator"):
            run.enrol("b")
        run.down()
        run.up()
        with pytest.raises(JoinError, match="site b: banned by the operator"):
            run.enrol("b")
        operator.change_standing("b", "unban")
        with pytest.raises(JoinError, match="no longer valid"):
            run.enrol("b", token=old)
        assert run.enrol("b").incarnation == 2
    finally:
        run.close()
