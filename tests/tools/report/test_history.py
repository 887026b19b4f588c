"""Metrics to rounds and events."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.report_runs import message, rounds, site, usual, whole

from dilocox.tools.report.history import read_history

pytestmark = pytest.mark.waits


def test_rounds_sites_and_held_out_loss() -> None:
    history = read_history(usual())
    assert [row.number for row in history.rounds] == [0, 1, 2]
    assert [row.loss for row in history.rounds] == [5.0, 4.0, 3.0]
    assert [each.site for each in history.rounds[0].sites] == ["lyon", "paris"]
    assert [each.tokens for each in history.of("paris")] == [300, 300, 300]
    assert [(e.step, e.loss) for e in history.evaluations] == [(0, 6.0), (60, 3.5)]
    assert history.flush_bytes == 1000
    assert (history.began, history.last) == (1000.0, 1000.0)


def test_a_resumed_run_forgets_what_it_left_behind() -> None:
    records = [
        *rounds(0, 1, 2),
        {"kind": "flush", "site": "paris", "payload_bytes": 9},
        {"kind": "resumed", "round": 1},
        *rounds(1),
        whole(1, loss=9.0),
    ]
    history = read_history(records)
    assert [row.number for row in history.rounds] == [0, 1]
    assert history.rounds[1].loss == 9.0
    assert history.flush_bytes == 0
    assert history.resumes == [1]


def test_messages_and_plans_become_events() -> None:
    plan = {"kind": "plan", "round": 4, "inner_steps": 30, "codec": "int2", "delay": 1, "slots": 2,
            "reason": "a slower link", "time": 5.0}  # fmt: skip
    history = read_history([message("lyon is gone: dead", "members"), message("hm"), plan])
    assert [(event.about, event.text) for event in history.events] == [
        ("members", "lyon is gone: dead"),
        ("", "hm"),
        ("plan", "plan from round 4: 30 inner steps, codec int2, landing 1 of 2 slots later (a "
         "slower link)"),
    ]  # fmt: skip


@pytest.mark.parametrize("value", [None, "5", True, [], math.nan, math.inf, 10**400])
def test_what_is_no_number_is_none(value: Any) -> None:
    history = read_history([site(0, "paris", loss=value, tokens=value), whole(0, loss=value)])
    assert history.rounds[0].loss is None
    assert history.rounds[0].sites[0].loss is None
    assert history.rounds[0].sites[0].tokens == 0


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
plain |= st.lists(plain, max_size=1) | st.dictionaries(st.text(max_size=2), plain, max_size=1)
keys = st.sampled_from(sorted(site(0, "x") | whole(0)))
kinds = st.sampled_from(["round", "flush", "evaluation", "message", "plan", "resumed", "other"])
records = st.lists(
    st.builds(
        lambda record, kind: {**record, "kind": kind},
        st.dictionaries(keys, plain, max_size=6),
        kinds,
    ),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(records)
def test_no_record_breaks_it(records: list[dict[str, Any]]) -> None:
    for row in read_history(records).rounds:
        assert math.isfinite(row.tokens)
        assert row.loss is None or math.isfinite(row.loss)
