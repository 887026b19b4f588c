"""The check of the ledger, against ledgers that are right, and wrong on purpose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.server.ledger import Entry, Ledger
from dilocox.coordinator.server.ledger_audit import audit, union

pytestmark = pytest.mark.waits


def entry(start: int, count: int, state: str, space: str = "all") -> Entry:
    return Entry("a", 1, 0, space, start, count, state)


def test_a_ledger_by_hand() -> None:
    # 0-9 trained on; 10-14 given back, of which 10-12 were given out again and trained on; 15-19
    # under way; private text has numbers of its own.
    ledger = Ledger(
        [
            entry(0, 10, "committed"),
            entry(10, 5, "returned"),
            entry(10, 3, "committed"),
            entry(15, 5, "issued"),
            entry(0, 4, "committed", "site/b"),
        ],
        {"all": 20, "site/b": 4},
        {"all": [(13, 2)]},
    )
    found = audit(ledger)
    assert (found.committed, found.doubled, found.unsettled, found.waiting, found.missing) == (
        17, 0, 5, 2, 0,
    )  # fmt: skip
    assert found.problem == ""
    ledger.entries.append(entry(8, 4, "committed"))
    assert audit(ledger).doubled == 4
    assert audit(ledger).problem.startswith("token ranges: 4 sequences were trained on twice")
    del ledger.pool["all"]
    assert audit(ledger).missing == 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8))
def test_a_union_holds_the_same_numbers(ranges: list[tuple[int, int]]) -> None:
    numbers = {n for start, count in ranges for n in range(start, start + count)}
    merged = union(ranges)
    assert {n for start, count in merged for n in range(start, start + count)} == numbers
    assert sum(count for _, count in merged) == len(numbers)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), max_size=20))
def test_what_a_ledger_gives_out_adds_up(steps: list[tuple[int, int, bool]]) -> None:
    ledger = Ledger()
    trained = 0
    for round_, (site, count, good) in enumerate(steps):
        name = "abc"[site]
        ranges = ledger.allocate("all", count, 0, list(ledger.pool.get("all", [])))
        ledger.issue(name, 1, round_, "all", ranges)
        if good:
            ledger.commit(name, 1, round_)
            trained += count
        else:
            ledger.give_back(name, 1)
    found = audit(ledger)
    assert (found.committed, found.doubled, found.missing, found.unsettled) == (trained, 0, 0, 0)
    assert found.committed + found.waiting == ledger.next.get("all", 0)
