"""A site enters with the state that most sites hold, whatever its donor says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import entry_messages as em
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.entry_requests import is_same, never_settled
from dilocox.coordinator.server.refusals import Refused
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

TRUE, FALSE = "a" * 64, "f" * 64


def piece(digest: str, number: int = 0, landed: int = 0) -> em.PieceDigest:
    return em.PieceDigest(piece=number, landed=landed, codec="", sha256=digest)


def entering(folder: Path, sites: str = "abcd", **sections: Any) -> Driver:
    """The last site enters a run whose others are in their second round."""
    driver = Driver(folder, run_config(sites, **sections), wait_for=len(sites) - 1)
    for site in sites[:-1]:
        driver.enrol(site)
    for site in sites[:-1]:
        driver.ready(site)
    driver.plan(0, "a")
    driver.enrol(sites[-1])
    driver.beat(sites[-1])
    return driver


def show(driver: Driver, site: str, *pieces: em.PieceDigest) -> None:
    rank = driver.check(m.RankId(site=site, stage=0, shard=0))
    driver.core.entries.show(em.ShowPiecesRequest(rank=rank, pieces=list(pieces)))


def check(
    driver: Driver,
    site: str,
    donor: str,
    *pieces: em.PieceDigest,
    renewals: int = 0,
    all_came: bool = False,
) -> em.CheckPiecesReply:
    rank = driver.check(m.RankId(site=site, stage=0, shard=0))
    request = em.CheckPiecesRequest(
        rank=rank, donor=donor, pieces=list(pieces), renewals=renewals, all_came=all_came
    )
    return driver.core.entries.check(request)


def test_what_most_hold_is_settled_and_nothing_else() -> None:
    assert is_same({}, 3, TRUE) is None
    assert is_same({"a": TRUE}, 3, TRUE) is None
    assert is_same({"a": TRUE, "b": TRUE}, 3, TRUE) is True
    assert is_same({"a": TRUE, "b": TRUE}, 3, FALSE) is False
    assert is_same({"a": TRUE, "b": FALSE}, 3, TRUE) is None
    assert is_same({"a": TRUE, "b": FALSE}, 2, TRUE) is False, "no majority of two"
    assert is_same({"a": TRUE}, 1, TRUE) is True


def test_a_version_is_hopeless_when_too_few_may_still_tell() -> None:
    assert not never_settled({}, 3, 3)
    assert not never_settled({"a": TRUE}, 1, 3)
    assert never_settled({"a": TRUE}, 0, 2)
    assert never_settled({"a": TRUE, "b": FALSE}, 1, 4)
    assert not never_settled({"a": TRUE, "b": TRUE}, 1, 4)


def test_a_false_state_costs_its_donor_the_entering_site_and_not_the_run(tmp_path: Path) -> None:
    driver = entering(tmp_path)
    state = driver.core.state
    assert state.sites["d"].donor == "a"
    show(driver, "a", piece(FALSE), piece(TRUE, 1))
    reply = check(driver, "d", "a", piece(FALSE), piece(TRUE, 1))
    assert (reply.same, reply.different, reply.donor) == ([], [], "a"), "one word of three"
    show(driver, "b", piece(TRUE), piece(TRUE, 1))
    show(driver, "c", piece(TRUE))
    reply = check(driver, "d", "a", piece(FALSE), piece(TRUE, 1))
    assert (reply.same, reply.different, reply.donor) == ([1], [0], "b")
    assert state.sites["d"].donor == "b"
    assert state.feed[-1][3] == "a gave d a state that most do not hold: it enters from b"
    assert {name: site.role for name, site in state.sites.items()} == {
        **dict.fromkeys("abc", "active"), "d": "entering"
    }  # fmt: skip
    assert check(driver, "d", "b", piece(TRUE)).same == [0]
    assert replayed(driver) == state
    driver.ready("d")
    assert state.shown == {}, "nobody enters any more"
    assert replayed(driver) == state
    driver.core.close()


def test_an_entering_site_slanders_nobody_but_before_itself(tmp_path: Path) -> None:
    """It says of all of them that they gave it something else; no active site goes for that."""
    driver = entering(tmp_path)
    for site in "abc":
        show(driver, site, piece(TRUE))
    donors = []
    for _ in range(3):
        donors.append(driver.core.state.sites["d"].donor)
        reply = check(driver, "d", str(donors[-1]), piece(FALSE))
    assert (donors, reply.donor) == (["a", "b", "c"], None)
    assert driver.core.state.feed[-1][3].endswith("there is no other donor")
    assert [driver.core.state.sites[site].role for site in "abc"] == ["active"] * 3
    driver.core.close()


def test_digests_are_of_a_version_and_of_who_is_active(tmp_path: Path) -> None:
    driver = entering(tmp_path)
    for site in "abc":
        show(driver, site, piece(TRUE, landed=-1))
    assert check(driver, "d", "a", piece(TRUE)).same == []
    assert check(driver, "d", "a", piece(TRUE, landed=-1)).same == [0]
    # The first word counts, no round that is not planned, and no word of who only enters.
    show(driver, "a", piece(FALSE, landed=-1), piece(TRUE, landed=1))
    show(driver, "d", piece(FALSE), piece(FALSE, 1))
    assert sorted(driver.core.state.shown) == ["0/0/0/-1/"]
    with pytest.raises(Refused, match="checks a state, but its site is active"):
        check(driver, "a", "b", piece(TRUE))
    driver.core.close()


def test_a_version_that_most_have_left_behind_is_fetched_again(tmp_path: Path) -> None:
    driver = entering(tmp_path)
    site = driver.core.state.sites["d"]
    show(driver, "a", piece(TRUE, landed=-1))

    def asks(renewals: int = 0, all_came: bool = True) -> int:
        reply = check(
            driver, "d", "a", piece(TRUE, landed=-1), renewals=renewals, all_came=all_came
        )
        assert (reply.same, reply.different, reply.donor) == ([], [], "a")
        return site.renewals

    assert asks() == 0, "b and c may still tell"
    show(driver, "b", piece(TRUE))
    assert asks() == 0, "with c it would be two of three"
    show(driver, "c", piece(TRUE))
    assert asks(all_came=False) == 0, "what is on its way may be of another version"
    assert asks() == 1
    assert driver.core.state.feed[-1][3] == (
        "d was given what the others have left behind: it fetches again from a"
    )
    assert asks() == 1, "another of its ranks"
    assert [each.renewals for each in driver.beat("d").entering] == [1]
    assert asks(renewals=1) == 2
    assert asks(renewals=2) == 2, "twice from one plan to the next"
    assert replayed(driver) == driver.core.state
    driver.core.close()


def test_digests_stay_however_long_a_state_travels(tmp_path: Path) -> None:
    driver = entering(tmp_path, outer={"rounds": 20})
    for name in "abc":
        show(driver, name, piece(TRUE, landed=-1), piece(TRUE, landed=0))
    kept = {"0/0/0/-1/", "0/0/0/0/"}
    for number in range(1, 12):
        for name in "abc":
            driver.round_done(name, number - 1)
        driver.plan(number, "a")
        assert kept <= driver.core.state.shown.keys(), number
    assert check(driver, "d", "a", piece(TRUE, landed=0)).same == [0]
    driver.core.close()


def test_nobody_fills_the_log_with_digests(tmp_path: Path) -> None:
    driver = entering(tmp_path)
    for number in range(256):
        show(driver, "a", piece(TRUE, number))
    with pytest.raises(Refused, match="digests of pieces"):
        show(driver, "a", piece(TRUE, 256))
    assert len(driver.core.state.shown) == 256
    show(driver, "b", piece(TRUE))
    driver.core.close()


def test_at_the_start_all_take_the_state_of_the_founder(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("abc"))
    driver.enrol_all()
    assert check(driver, "b", "a", piece(TRUE)).same == [0]
    driver.core.close()
