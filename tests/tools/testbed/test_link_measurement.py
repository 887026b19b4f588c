"""Which transfers measure a network, and which of them may run at the same time; pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.link_measurement import Measured, Transfer, batches, transfers
from dilocox.tools.testbed.link_spec import Line, Links

pytestmark = pytest.mark.alone

SITES = ["a", "b", "c"]
HOSTS = [*SITES, "hub"]


def test_every_direction_of_every_line_is_measured_against_the_free_host() -> None:
    links = Links().with_all(Line(2e6, 5e6), SITES)
    found = transfers(links, HOSTS)
    assert [t.link for t in found] == ["a up", "a down", "b up", "b down", "c up", "c down"]
    assert found[0] == Transfer("a up", "a", "hub", 2e6, "a", True)
    assert found[1] == Transfer("a down", "hub", "a", 5e6, "a", False)


def test_a_pair_is_measured_both_ways_up_to_what_its_lines_let_through() -> None:
    links = Links({"a": Line(3e6, None)}, {("a", "b"): 5e6})
    rates = {t.link: t.rate for t in transfers(links, HOSTS)}
    assert rates == {"a up": 3e6, "a to b": 3e6, "b to a": 5e6}


def test_a_line_is_not_measured_through_a_pair() -> None:
    links = Links({"a": Line(9e6, 9e6)}, {("a", "hub"): 1e6})
    up, down, *_ = transfers(links, ["a", "b", "hub"])
    assert (up.target, down.source) == ("b", "b")
    with pytest.raises(LabError, match="a down: cannot be measured"):
        transfers(Links({"a": Line(None, 9e6)}, {("a", "hub"): 1e6}), ["a", "hub"])
    with pytest.raises(LabError, match="a up: cannot be measured, because each of the other hosts"):
        transfers(Links({"a": Line(9e6, None)}, {("a", "hub"): 1e6}), ["a", "hub"])


@given(
    st.dictionaries(
        st.sampled_from(SITES),
        st.builds(Line, st.sampled_from([None, 1e6, 5e6]), st.sampled_from([None, 2e6, 9e6])),
    ),
    st.sets(st.sampled_from([("a", "b"), ("a", "c"), ("b", "c")])),
    st.sampled_from([3e6, 1e9]),
)
def test_in_a_batch_every_port_sees_one_transfer(
    lines: dict[str, Line], pairs: set[tuple[str, str]], at_once: float
) -> None:
    every = transfers(Links(lines, dict.fromkeys(pairs, 4e6)), HOSTS)
    found = batches(every, at_once)
    assert sorted(t.link for batch in found for t in batch) == sorted(t.link for t in every)
    for batch in found:
        assert len(batch) == 1 or sum(t.rate for t in batch) <= at_once
        for one in batch:
            for other in batch:
                if one is not other:
                    passes = {(other.source, True), (other.target, False)}
                    assert (one.port, one.receives) not in passes


def test_all_lines_of_a_lab_are_measured_in_one_go() -> None:
    every = transfers(Links().with_all(Line(2e6, 2e6), SITES), HOSTS)
    assert len(batches(every, 1e9)) == 1
    assert len(batches(every, 4e6)) == 3
    assert len(batches(every, 1e6)) == 6


def test_no_line_fills_two_others_at_the_same_time() -> None:
    links = Links().with_all(Line(2e6, 2e6), SITES)
    for batch in batches(transfers(links, SITES), 1e9):
        sources = [transfer.source for transfer in batch]
        assert len(set(sources)) == len(sources)
    assert len(batches(transfers(links, ["hub", *SITES]), 1e9)) == 1


@pytest.mark.parametrize(
    ("rate", "slow", "good"), [(94.9, True, False), (95.1, False, True), (104.9, False, True),
                               (105.1, False, False)],
)  # fmt: skip
def test_five_per_cent_are_let_pass(rate: float, slow: bool, good: bool) -> None:
    link = Measured("a up", "a", "hub", 100e6, rate * 1e6)
    assert link.is_slow == slow
    if good:
        link.check()
    else:
        with pytest.raises(LabError, match="link a up: 100 Mbit/s requested, but "):
            link.check()
