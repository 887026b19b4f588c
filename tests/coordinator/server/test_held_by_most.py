"""What one rank says that it has of another site's contribution decides nothing by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.coordinator.server.refusals import Caller
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

KEY = m.ExchangeKey.outer(0, 0, 0)
OWN = {site: f"{number:064x}" for number, site in enumerate("abcm")}
OTHER = "f" * 64


def begun(folder: Path, sites: str = "abcm", **sections: Any) -> Driver:
    """All sites have begun the first exchange."""
    driver = Driver(folder, run_config(sites, **sections))
    driver.start()
    driver.plan(0, "a")
    for site in sites:
        driver.begin(KEY, site)
    return driver


def vote(
    driver: Driver,
    site: str,
    held: str,
    attempt: int = 1,
    saw: Mapping[str, str] | None = None,
    **fields: Any,
) -> m.VoteReply:
    """The vote of a site that holds the payloads of the sites in `held`; `saw` names payloads that
    are not the ones that their senders name."""
    opinions = {s: RankOpinion(digest={**OWN, **(saw or {})}[s]) for s in held}
    said = {"digests": {site: OWN[site]}, "opinions": opinions, **fields}
    return driver.vote(KEY, site, attempt, held=list(held), **said)


def insist(driver: Driver, key: m.ExchangeKey = KEY) -> m.VoteReply | None:
    """All that are to fetch, or are fetched from, say again what they have said before; the last
    reply, if there is any."""
    exchange, reply = driver.core.state.exchanges[key.text], None
    attempt, votes = exchange.attempt, dict(exchange.votes)
    for site, _, shard in sorted(exchange.fetching):
        said = votes[site, 0, shard]
        reply = driver.vote(
            key, site, attempt, shard, phase="fetched", held=said.held, opinions=said.opinions
        )
    return reply


def roles(driver: Driver) -> dict[str, str]:
    return {name: site.role for name, site in driver.core.state.sites.items()}


def told(driver: Driver) -> list[str]:
    """What people are told of."""
    shown = ("join", "leave", "phase")
    return [text for _, _, kind, text in driver.core.state.feed if kind in shown]


@pytest.mark.parametrize("held", ["m", "mab", "mb"])
@pytest.mark.parametrize("mode", ["gather", "reduce"])
def test_who_says_that_it_does_not_hold_what_most_hold_is_set_aside(
    tmp_path: Path, mode: str, held: str
) -> None:
    driver = begun(tmp_path, outer={"exchange": mode})
    assert vote(driver, "m", held).decision == "wait"
    for site in "abc":
        reply = vote(driver, site, "abcm")
    reply = insist(driver) or reply
    assert (reply.decision, reply.attempt) == ("repeat", 2)
    assert roles(driver) == {**dict.fromkeys("abc", "active"), "m": "entering"}
    assert vote(driver, "m", held).decision == "repeat"
    assert "m" not in [member.site for member in driver.begin(KEY, "m").members]
    for site in "abc":
        reply = vote(driver, site, "abc", 2)
    if mode == "reduce":
        assert reply.decision == "average"
        for site in "abc":
            reply = driver.vote(KEY, site, 2, phase="done")
    assert (reply.decision, reply.set) == ("commit", ["a", "b", "c"])
    missing = ", ".join(site for site in "abc" if site not in held)
    assert told(driver)[-1] == (
        f"m is left behind: most hold what {missing} sent at outer/0/0/0, and it says that it does "
        f"not; it enters again from {driver.core.state.sites['m'].donor}"
    )
    assert replayed(driver) == driver.core.state
    driver.core.close()


def test_what_most_do_not_hold_does_not_count_and_its_sender_stays(tmp_path: Path) -> None:
    driver = begun(tmp_path)
    vote(driver, "m", "abcm")
    for site in "abc":
        reply = vote(driver, site, "abc")
    assert (reply.decision, reply.set) == ("commit", ["a", "b", "c"])
    assert driver.core.state.exchanges[KEY.text].verdicts["m"].code == "not-held"
    assert roles(driver) == dict.fromkeys("abcm", "active")
    driver.core.close()


def test_half_against_half_is_no_majority(tmp_path: Path) -> None:
    driver = begun(tmp_path)
    for site in "bc":
        vote(driver, site, "abc")
    for site in "am":
        reply = vote(driver, site, "abcm")
    assert (reply.decision, reply.set) == ("commit", ["a", "b", "c"])
    assert roles(driver) == dict.fromkeys("abcm", "active")
    driver.core.close()


def test_a_liar_that_also_slights_one_is_the_one_that_goes(tmp_path: Path) -> None:
    """m sends rubbish to c, and says that it does not hold what a sent. It has part in both."""
    driver = begun(tmp_path)
    vote(driver, "m", "bcm")
    vote(driver, "c", "abc")
    for site in "ab":
        vote(driver, site, "abcm")
    assert {each[:2] for each in fetching(driver)} == {("m", "a"), ("c", "m")}
    insist(driver)
    assert roles(driver) == {**dict.fromkeys("abc", "active"), "m": "entering"}
    driver.core.close()


@pytest.mark.parametrize("liar", ["a", "m"])
def test_one_rank_of_many_is_not_believed_about_a_payload(tmp_path: Path, liar: str) -> None:
    """It says that all others have sent it something else than they say."""
    driver = begun(tmp_path)
    honest = [site for site in "abcm" if site != liar]
    vote(driver, liar, "abcm", saw=dict.fromkeys(honest, OTHER))
    for site in honest:
        vote(driver, site, "abcm")
    reply = insist(driver)
    assert reply is not None
    assert reply.decision == "repeat"
    assert [name for name, role in roles(driver).items() if role != "active"] == [liar]
    for site in honest:
        reply = vote(driver, site, "".join(honest), 2)
    assert (reply.decision, reply.set) == ("commit", honest)
    driver.core.close()


def test_who_sends_most_another_payload_than_it_names_does_not_count(tmp_path: Path) -> None:
    driver = begun(tmp_path)
    vote(driver, "m", "abcm")
    vote(driver, "a", "abcm")
    for site in "bc":
        reply = vote(driver, site, "abcm", saw={"m": OTHER})
    assert (reply.decision, reply.set) == ("commit", ["a", "b", "c"])
    assert driver.core.state.exchanges[KEY.text].verdicts["m"].code == "equivocation"
    driver.core.close()


def test_what_does_not_count_anyway_is_nobodys_fault(tmp_path: Path) -> None:
    """m lets its contribution not count: who has not got it whole misses nothing."""
    driver = begun(tmp_path)
    vote(driver, "m", "abcm", contributes=False)
    vote(driver, "a", "abc", contributes=True)
    for site in "bc":
        reply = vote(driver, site, "abcm", contributes=True)
    assert reply.decision == "commit"
    assert roles(driver) == dict.fromkeys("abcm", "active")
    driver.core.close()


def test_where_nobody_can_enter_again_it_has_to_go(tmp_path: Path) -> None:
    """Gradients are exchanged in every step, and in a run that stops there is no round to enter."""
    key = m.ExchangeKey.gradient(0, 0, 0)
    driver = Driver(tmp_path, run_config("abm", outer={"method": "allreduce"}))
    driver.start()
    driver.plan(0, "a")
    for site in "abm":
        driver.begin(key, site)
        driver.vote(key, site, held=["m"] if site == "m" else list("abm"), contributes=True)
    assert roles(driver) == {"a": "active", "b": "active", "m": "gone"}
    for site in "ab":
        attempt = driver.core.state.exchanges[key.text].attempt
        held = list("ab")
        reply = driver.vote(key, site, attempt, held=held, contributes=True)
    assert reply.set == ["a", "b"]
    driver.core.close()


def test_in_a_run_that_stops_it_has_to_go(tmp_path: Path) -> None:
    driver = begun(tmp_path)
    driver.core.departures.stop(m.StopRequest(reason="enough"))
    for site in "abc":
        vote(driver, site, "abcm")
    vote(driver, "m", "m")
    insist(driver)
    assert roles(driver) == {**dict.fromkeys("abc", "active"), "m": "gone"}
    driver.core.close()


def test_who_is_set_aside_when_the_flush_is_planned_already_has_no_part_in_it(
    tmp_path: Path,
) -> None:
    """It has no round to enter again with: the others would wait for it in vain."""
    driver = begun(tmp_path, outer={"rounds": 1})
    for site in "abc":
        vote(driver, site, "abcm")
    flush = driver.plan(1, "a")
    assert flush is not None
    assert (flush.kind, list(flush.members)) == ("flush", list("abcm"))
    vote(driver, "m", "m")
    insist(driver)
    key = m.ExchangeKey.outer(1, 0, 0)
    assert [member.site for member in driver.begin(key, "a").members] == ["a", "b", "c"]
    assert driver.core.plan(1, Caller("m", 1)).receive
    driver.core.close()


def test_two_sites_are_told_what_they_can_do_and_what_they_deny(tmp_path: Path) -> None:
    two = begun(tmp_path, "ab")
    starting = told(two).index("starting with a, b")
    assert told(two)[starting + 1].startswith("two sites have no majority: either can deny")
    for round_ in range(4):
        two.plan(round_, "a")
        for fragment in (0, 1):
            key = m.ExchangeKey.outer(round_, 0, fragment)
            denied = (round_, fragment) != (0, 1)
            for site in "ab":
                two.begin(key, site)
                held = "a" if site == "a" and denied else "ab"
                reply = two.vote(key, site, held=list(held))
            assert reply.set == (["a"] if denied else ["a", "b"])
        for site in "ab":
            two.round_done(site, round_)
    said = [text for text in told(two) if "does not count, since" in text]
    assert (
        said[0] == "outer/0/0/0: what b sent does not count, since a says that it does not hold it"
    )
    assert said[1].startswith("outer/1/0/0: what b sent does not count, since a says")
    assert "a alone has denied it 2 times" in said[1]
    assert [text.split(":")[0] for text in said[2:]] == ["outer/2/0/0"], (
        "the fourth, then the eighth"
    )
    assert replayed(two) == two.core.state
    two.core.close()


def test_what_is_denied_twice_by_one_and_nobody_else_is_told(tmp_path: Path) -> None:
    driver = begun(tmp_path)
    for site, held in (("a", "abcm"), ("b", "abcm"), ("c", "abcm"), ("m", "bcm")):
        vote(driver, site, held)
    insist(driver)
    assert not [text for text in told(driver) if "alone" in text]
    driver.ready("m")
    assert driver.core.state.sites["m"].role == "active"
    round_ = driver.core.state.sites["m"].active_from
    driver.plan(round_, "a")
    key = m.ExchangeKey.outer(round_, 0, 0)
    for site, held in (("a", "abcm"), ("b", "abcm"), ("c", "abcm"), ("m", "bcm")):
        driver.begin(key, site)
        opinions = {name: RankOpinion(digest=OWN[name]) for name in held}
        driver.vote(key, site, held=list(held), digests={site: OWN[site]}, opinions=opinions)
    assert told(driver)[-1].startswith("what a sent: m alone has denied it 2 times")
    driver.core.close()


def test_a_set_of_less_than_half_is_told(tmp_path: Path) -> None:
    driver = begun(tmp_path)
    for site in "abcm":
        reply = vote(driver, site, "abcm", contributes=site == "a")
    assert reply.set == ["a"]
    assert told(driver)[-1] == (
        "outer/0/0/0: 1 of 4 contributions count (a), "
        "without b (withdrawn), c (withdrawn), m (withdrawn)"
    )
    driver.core.close()


def test_a_majority_that_was_sent_something_else_is_told(tmp_path: Path) -> None:
    driver = begun(tmp_path)
    for site in "am":
        vote(driver, site, "abcm")
    for site in "bc":
        vote(driver, site, "abcm", saw={"m": OTHER})
    assert told(driver)[-1] == (
        "outer/0/0/0: what m sent does not count, since b, c say that they got something else from "
        "it than it names"
    )
    driver.core.close()


def fetching(driver: Driver) -> list[tuple[str, str, str]]:
    """Who fetches whose contribution from whom."""
    exchange = driver.core.state.exchanges[KEY.text]
    return [(each.site, each.sender, each.holder) for each in exchange.fetches]


@pytest.mark.parametrize("saw", [{}, {"m": OTHER}])
def test_what_one_does_not_hold_it_fetches_and_votes_again(
    tmp_path: Path, saw: Mapping[str, str]
) -> None:
    """m sends rubbish to c alone, or another payload: c gets from another what most hold."""
    driver = begun(tmp_path)
    vote(driver, "c", "abcm" if saw else "abc", saw=saw)
    for site in "abm":
        assert vote(driver, site, "abcm").decision == "wait"
    ((site, sender, holder),) = fetching(driver)
    assert (site, sender) == ("c", "m")
    assert holder in ("a", "b"), "of who got it, not of who sent something else"
    # They are told when they ask on with their votes, and the others wait.
    (bystander,) = {"a", "b"} - {holder}
    assert vote(driver, bystander, "abcm").decision == "wait"
    asked = vote(driver, holder, "abcm")
    assert asked.decision == "fetch"
    assert asked.fetches == vote(driver, "c", "abc").fetches
    assert asked.fetches[0].digest == OWN["m"]
    # What they asked on with was no second vote.
    assert vote(driver, "c", "abcm", phase="fetched").decision == "wait"
    driver.reopen()
    reply = vote(driver, holder, "abcm", phase="fetched")
    assert (reply.decision, reply.set) == ("commit", list("abcm"))
    assert roles(driver) == dict.fromkeys("abcm", "active")
    feed = [text for _, _, kind, text in driver.core.state.feed if kind == "decision"]
    assert feed == [f"outer/0/0/0: c fetches from {holder} what m sent, which did not arrive whole"]
    assert replayed(driver) == driver.core.state
    driver.core.close()


def test_another_attempt_fetches_from_another(tmp_path: Path) -> None:
    """One that says of everybody it fetches from that the link broke has not one to report."""
    driver = begun(tmp_path)
    holders = set()
    for attempt in (1, 2):
        for site in "abcm":
            driver.begin(KEY, site)
            vote(driver, site, "bcm" if site == "m" else "abcm", attempt)
        ((site, _, holder),) = fetching(driver)
        assert site == "m"
        holders.add(holder)
        driver.vote(KEY, "m", attempt, broken=True, failed=[holder])
    assert len(holders) == 2
    driver.core.close()


def test_who_has_nothing_to_fetch_does_not_change_its_vote(tmp_path: Path) -> None:
    driver = begun(tmp_path)
    vote(driver, "a", "abcm")
    vote(driver, "a", "a", phase="fetched")
    assert driver.core.state.exchanges[KEY.text].votes["a", 0, 0].held == list("abcm")
    # Nor does one that is fetched from.
    vote(driver, "b", "abcm")
    vote(driver, "m", "abcm")
    vote(driver, "c", "abc")
    ((_, _, holder),) = fetching(driver)
    vote(driver, holder, holder, phase="fetched")
    assert driver.core.state.exchanges[KEY.text].votes[holder, 0, 0].held == list("abcm")
    driver.core.close()
