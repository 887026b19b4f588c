"""Which contributions count: every code by hand, and what no liar can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.protocol.verdicts import WHOLE, RankOpinion
from dilocox.coordinator.server.contribution_rules import Evidence, judge

pytestmark = pytest.mark.waits

SITES = ["a", "b", "c", "d"]


def digest(text: str) -> str:
    return (text.encode().hex() * 64)[:64]


def evidence(
    found: Mapping[str, Mapping[str, Any]], sites: Sequence[str] = SITES, **more: Any
) -> Evidence:
    """All ranks of one shard think the same."""
    opinions = {site: RankOpinion(**found.get(site, {})) for site in sites}
    digests = {site: [digest(site)] for site in sites}
    given = Evidence(whole=list(sites), opinions=[[opinions] * len(sites)], digests=digests)
    return replace(given, **more)


def codes(given: Evidence) -> dict[str, str]:
    """Of those that do not count."""
    verdicts = judge(given).verdicts
    return {site: v.code for site, v in verdicts.items() if v.code != "admitted"}


def test_where_all_is_in_order_all_count() -> None:
    found = judge(evidence({}))
    assert found.set == SITES
    assert (found.shares, found.usual) == ({}, None)
    assert all(v.code == "admitted" and v.flags == [] for v in found.verdicts.values())


def test_a_zero_is_no_contribution_unless_all_are() -> None:
    assert codes(evidence({"b": {"code": "zero"}})) == {"b": "zero"}
    assert codes(evidence({"b": {"code": "zero"}}, training=False)) == {}
    everyone = {site: {"code": "zero"} for site in SITES}
    same = {site: [digest("0")] for site in SITES}
    assert codes(evidence(everyone, digests=same)) == {}


@pytest.mark.parametrize("training", [True, False])
def test_equal_zeros_are_no_copies(training: bool) -> None:
    """As all sites send them in a flush that nothing is left for."""
    everyone = {site: {"code": "zero"} for site in SITES}
    same = {site: [digest("0")] for site in SITES}
    found = judge(evidence(everyone, digests=same, training=training))
    assert found.set == SITES
    assert all(v.flags == [] for v in found.verdicts.values())


def test_what_was_not_committed_to_does_not_count() -> None:
    assert codes(evidence({}, uncommitted=["b"])) == {"b": "uncommitted"}
    assert codes(evidence({"b": {"code": "zero"}}, uncommitted=["b"])) == {"b": "uncommitted"}


def test_the_same_bytes_count_once_and_raise_a_flag() -> None:
    digests = {site: [digest(site)] for site in SITES} | {"c": [digest("a")]}
    found = judge(evidence({}, digests=digests))
    assert found.set == ["a", "b", "d"]
    assert found.verdicts["c"].code == "duplicate"
    assert found.verdicts["a"].flags == ["copied"]


def test_nobody_is_the_copy_of_one_who_has_not_committed() -> None:
    """A site that commits to nothing and votes with another's digest does not take its place."""
    digests = {site: [digest(site)] for site in SITES} | {"a": [digest("c")]}
    assert codes(evidence({}, digests=digests, uncommitted=["a"])) == {"a": "uncommitted"}


def test_last_rounds_bytes_are_stale() -> None:
    assert codes(evidence({}, earlier=frozenset([digest("d")]))) == {"d": "stale"}


def test_who_sends_different_payloads_equivocates() -> None:
    given = evidence({})
    other = {**given.opinions[0][0], "b": RankOpinion(digest=digest("else"))}
    true = {**given.opinions[0][0], "b": RankOpinion(digest=digest("b"))}
    assert codes(replace(given, opinions=[[true, other, other, true]])) == {"b": "equivocation"}
    assert codes(replace(given, opinions=[[true] * 4])) == {}
    # One rank's word condemns nobody, unless there are two in all.
    assert codes(replace(given, opinions=[[true, true, other, true]])) == {}
    assert codes(replace(given, opinions=[[true, other]])) == {"b": "equivocation"}


def test_what_is_missing_has_a_reason() -> None:
    given = evidence(
        {"b": {"code": "malformed"}, "c": {"code": "not-finite"}},
        whole=["a"], missing=["b", "c", "d"],
    )  # fmt: skip
    assert codes(given) == {"b": "malformed", "c": "not-finite", "d": "not-held"}
    assert judge(given).set == ["a"]
    assert codes(evidence({}, whole=["a", "b"], withdrawn=["c"])) == {"c": "withdrawn"}


def test_the_reason_is_the_one_that_most_give() -> None:
    said = [RankOpinion(code=code) for code in ("not-finite", "malformed", "malformed")]
    given = evidence({}, whole=["a", "b", "c"], missing=["d"])
    given = replace(given, opinions=[[{"d": each} for each in said]])
    assert codes(given) == {"d": "malformed"}


@pytest.mark.parametrize(
    ("given", "flags"),
    [({"norm": 3001}, ["large"]), ({"norm": 332}, ["small"]), ({"cosine": -1}, ["against"]),
     ({"norm": 9000, "cosine": -900}, ["large", "against"]), ({"norm": 400, "cosine": 0}, [])],
)  # fmt: skip
def test_norm_and_direction_only_raise_flags(given: dict[str, int], flags: list[str]) -> None:
    found = judge(evidence({"a": given}))
    assert found.set == SITES
    assert found.verdicts["a"].flags == flags


def gated(gains: Sequence[int], usual: int | None = None) -> Evidence:
    sites = SITES[: len(gains)]
    said = {site: {"gain": gain, "loss": 3_000_000}
            for site, gain in zip(sites, gains, strict=True)}  # fmt: skip
    return evidence(said, sites, tolerance=2000, usual=usual)


@pytest.mark.parametrize(
    ("gains", "usual", "rejected", "after"),
    [
        ((100_000, 90_000, 95_000, -80_000), None, ["d"], 95_000),
        # Within the tolerance of 0.2 % of the loss: 6,000.
        ((100_000, 90_000, 95_000, -6_000), None, [], 90_000),
        # Harmful, but the sites differ that much.
        ((40_000, 20_000, 0, -20_000), None, [], 0),
        # Two sites: nobody is unlike the others, but what was usual is known.
        ((100_000, -80_000), None, [], 0),
        ((100_000, -80_000), 120_000, ["b"], 110_000),
        # Most do harm: the held-out text is at fault.
        ((-90_000, -80_000, -85_000, 10_000), 100_000, [], 100_000),
    ],
)
def test_the_gate(
    gains: tuple[int, ...], usual: int | None, rejected: list[str], after: int | None
) -> None:
    found = judge(gated(gains, usual))
    assert codes(gated(gains, usual)) == dict.fromkeys(rejected, "loss")
    assert found.usual == after


def test_gains_of_shards_add_up() -> None:
    """Half a contribution may look harmful where the whole is not, and the other way round."""

    def shard(gains: Sequence[int | None]) -> list[dict[str, RankOpinion]]:
        said = zip(SITES, gains, strict=True)
        return [{site: RankOpinion(gain=gain, loss=3_000_000) for site, gain in said}] * 4

    one, other = (-90_000, 50_000, 45_000, 50_000), (200_000, 55_000, 50_000, -150_000)
    given = replace(evidence({}, tolerance=2000), opinions=[shard(one), shard(other)])
    verdicts = judge(given).verdicts
    assert [verdicts[site].gain for site in SITES] == [110_000, 105_000, 95_000, -100_000]
    assert codes(given) == {"d": "loss"}
    # What one shard cannot tell is not told by the other's part.
    given = replace(given, opinions=[shard(one), shard((None, 55_000, 50_000, 55_000))])
    assert codes(given) == {}
    # Nor is there a sum that a verdict could not say.
    given = replace(given, opinions=[shard((2**53, 1, 1, -(2**53)))] * 2)
    assert codes(given) == {"d": "loss"}
    assert [judge(given).verdicts[site].gain for site in "ad"] == [2**53, -(2**53)]


def test_shares_are_the_middle_of_what_ranks_propose() -> None:
    ranks = [
        {"a": RankOpinion(shares=[10, WHOLE]), "b": RankOpinion(shares=[50, 60])},
        {"a": RankOpinion(shares=[30, 5]), "b": RankOpinion(shares=[50, 60])},
        {"a": RankOpinion(shares=[20, 9]), "b": RankOpinion(shares=[50])},
    ]
    found = judge(Evidence(whole=["a", "b"], opinions=[ranks]))
    assert found.shares == {"a": [[20, 9]], "b": [[50, 60]]}


def test_shares_of_nothing_are_shares() -> None:
    """They say that nothing counts, not that all does."""
    ranks = [{"a": RankOpinion(shares=[0, 0]), "b": RankOpinion(code="zero", shares=[WHOLE] * 2)}]
    found = judge(Evidence(whole=["a", "b"], opinions=[ranks]))
    assert found.set == ["a"]
    assert found.shares == {"a": [[0, 0]]}
    assert judge(evidence({})).shares == {}


HALF, TENTH = WHOLE // 2, WHOLE // 10


@pytest.mark.parametrize(
    ("proposed", "withdrawn", "left"),
    [
        # Cut down to what d sent, which has withdrawn: the others' median is b.
        ((TENTH, TENTH // 2, TENTH // 4, WHOLE), "d", (WHOLE, WHOLE, HALF)),
        ((HALF, WHOLE, TENTH, WHOLE), "cd", (HALF, WHOLE)),
        ((WHOLE, TENTH, WHOLE, WHOLE), "bcd", (WHOLE,)),
        ((TENTH, WHOLE, WHOLE, WHOLE), "bcd", (WHOLE,)),
        # Too far from the one that has withdrawn to be told apart.
        ((0, 0, WHOLE, WHOLE), "cd", (0, 0)),
    ],
)
def test_who_has_withdrawn_does_not_say_how_much_of_the_others_counts(
    proposed: tuple[int, ...], withdrawn: str, left: tuple[int, ...]
) -> None:
    said = {site: RankOpinion(shares=[n, WHOLE]) for site, n in zip(SITES, proposed, strict=True)}
    others = [site for site in SITES if site not in withdrawn]
    found = judge(Evidence(others, [[said] * 4], withdrawn=list(withdrawn)))
    assert found.set == others
    for site, share in zip(others, left, strict=True):
        assert found.shares[site][0] == pytest.approx([share, WHOLE], rel=1e-3)
    # One of four that makes up sites, or shares of other tensors, does not change that.
    lies = {site: RankOpinion(shares=[WHOLE]) for site in [*SITES, "nobody"]}
    again = judge(Evidence(others, [[said, said, said, lies]], withdrawn=list(withdrawn)))
    assert again.shares == found.shares


LIES = st.builds(
    RankOpinion,
    code=st.sampled_from(["admitted", "zero"]),
    norm=st.integers(0, 10**9),
    cosine=st.integers(-1000, 1000),
    gain=st.integers(-(10**9), 10**9),
    loss=st.just(3_000_000),
    shares=st.lists(st.integers(0, WHOLE), min_size=1, max_size=1),
)


@given(st.lists(LIES, min_size=5, max_size=5), st.lists(LIES, min_size=5, max_size=5))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_two_liars_of_five_decide_nothing(
    first: list[RankOpinion], second: list[RankOpinion]
) -> None:
    """Whatever they say of whom: no verdict and no share leaves what the honest ranks say."""
    sites = [*SITES, "e"]
    honest = {
        site: RankOpinion(norm=1000, cosine=500, gain=1000 * number, loss=3_000_000, shares=[WHOLE])
        for number, site in enumerate(sites)
    }
    lies = [dict(zip(sites, said, strict=True)) for said in (first, second)]
    given = Evidence(whole=sites, opinions=[[honest, honest, honest, *lies]], tolerance=2000)
    alone = judge(replace(given, opinions=[[honest] * 3]))
    assert judge(given) == alone
    # Nor if one of the honest has withdrawn, and is much smaller than the others.
    honest |= {site: honest[site].model_copy(update={"shares": [WHOLE // 9]}) for site in "abcd"}
    gone = replace(given, whole=SITES, opinions=[[honest] * 3 + lies], withdrawn=["e"])
    alone = judge(replace(gone, opinions=[[honest] * 3]))
    assert judge(gone) == alone
    assert alone.shares == {site: [[WHOLE]] for site in SITES}
