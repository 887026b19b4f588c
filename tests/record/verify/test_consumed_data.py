"""Token ranges out of a record's statements or a ledger."""

from __future__ import annotations

from typing import Any

from dilocox.record.verify.consumed_data import Consumed, from_ledger, from_steps


def step(round_: int, fragment: int, **changes: Any) -> dict[str, Any]:
    first = 16 * round_
    return {
        "kind": "train", "round": round_, "fragment": fragment, "first_tick": 4 * round_,
        "slots": 4, "ranges": {"paris": [[first, 8]], "lyon": [[first + 8, 6], [99, 2]]},
        "spaces": {"paris": "shared", "lyon": "site/lyon"},
    } | changes  # fmt: skip


STEPS = [step(0, 0), step(0, 1), step(1, 0), step(2, 0, kind="flush", slots=0, ranges={})]


def test_whole_rounds_count_once() -> None:
    first = [Consumed("paris", 0, "shared", 0, 8), Consumed("lyon", 0, "site/lyon", 8, 6),
             Consumed("lyon", 0, "site/lyon", 99, 2)]  # fmt: skip
    assert from_steps(STEPS, rounds=1) == first
    assert from_steps(STEPS)[:3] == first
    assert len(from_steps(STEPS)) == 6


def test_a_checkpoint_within_a_round_has_seen_part_of_it() -> None:
    # Three of the second round's four slots: 6 of its 8 sequences, in the order of the ranges.
    late = [each for each in from_steps(STEPS, tick=7) if each.round == 1]
    assert late == [Consumed("paris", 1, "shared", 16, 6), Consumed("lyon", 1, "site/lyon", 24, 6)]
    assert {each.round for each in from_steps(STEPS, tick=4)} == {0}


def test_a_site_that_was_left_out_of_a_round_has_not_trained_the_model() -> None:
    alone = step(0, 0, ranges={"paris": [[0, 8]]})
    assert {each.site for each in from_steps([alone])} == {"paris"}


def test_a_ledger_knows_what_was_committed() -> None:
    entry = {
        "site": "paris",
        "round": 0,
        "space": "shared",
        "start": 0,
        "count": 4,
        "incarnation": 1,
    }
    ledger = {"entries": [entry | {"state": "committed"}, entry | {"state": "returned"},
                          entry | {"state": "committed", "round": 1}]}  # fmt: skip
    assert from_ledger(ledger, 1) == [Consumed("paris", 0, "shared", 0, 4)]
    assert len(from_ledger(ledger, None)) == 2
