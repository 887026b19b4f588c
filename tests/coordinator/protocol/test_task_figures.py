"""Figures of tasks: out of lm-eval's results, through a report, to lines for people."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.coordinator.protocol.task_figures import (
    SHOWN,
    Figure,
    as_report,
    checked_figures,
    comparison,
    figures_of,
    line,
    reported,
)

GROUP: dict[str, Any] = {
    "results": {
        "mmlu": {"alias": "mmlu", "acc,none": 0.25, "acc_stderr,none": 0.01, "sample_len": 30},
        "stem": {"alias": "stem", "acc,none": 0.5, "acc_stderr,none": "N/A"},
        "algebra": {"alias": "algebra", "acc,none": 0.5, "acc_stderr,none": 0.1},
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.1,
            "exact_match_stderr,strict-match": 0.02,
            "exact_match,flexible-extract": float("nan"),
            "exact_match_stderr,flexible-extract": float("nan"),
        },
        "plain": {"alias": "plain"},
        "member": {"alias": "member", "acc,none": 1, "sample_len": 4},
    },
    "group_subtasks": {"mmlu": ["stem"], "stem": ["algebra"], "plain": ["member"]},
    "n-samples": {"gsm8k": {"original": 100, "effective": 7}},
}


def test_a_group_with_figures_stands_for_its_members() -> None:
    assert figures_of(GROUP) == [
        Figure("mmlu", "acc", 0.25, 0.01, 30),
        Figure("gsm8k", "exact_match,strict-match", 0.1, 0.02, 7),
        Figure("gsm8k", "exact_match,flexible-extract", None, None, 7),
        Figure("member", "acc", 1.0, None, 4),
    ]


names = st.text("abcz_-,", min_size=1, max_size=20)
numbers = st.floats(-1e6, 1e6)
words = st.text("ab/,", max_size=6)
figures = st.builds(
    Figure, names, names, st.none() | numbers, st.none() | numbers, st.integers(0, 10**6)
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(figures, min_size=1, max_size=12, unique_by=(lambda f: f.name, lambda f: f.task)))
def test_a_report_says_the_figures(own: list[Figure]) -> None:
    said = json.loads(json.dumps(as_report(own), allow_nan=False))
    assert reported(checked_figures(said)) == own


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"results": {}, "stderr": {}, "samples": {}},
        {"results": [1], "stderr": {}, "samples": {}},
        {"results": {"a/acc": 1.0}, "stderr": {}},
        {"results": {"a/acc": "text"}, "stderr": {}, "samples": {}},
        {"results": {f"a/{n}": 1.0 for n in range(3000)}, "stderr": {}, "samples": {}},
    ],
)
def test_a_report_without_results_is_none(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="missing"):
        checked_figures(said)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["results", "stderr", "samples"]),
        st.dictionaries(words, st.none() | words | st.integers() | st.floats()) | words,
    )
)
def test_any_line_can_be_read(said: dict[str, Any]) -> None:
    for each in reported(said):
        assert isinstance(each.text, str)


def test_a_line_for_people() -> None:
    own = [Figure("arc", "acc", 0.25, 0.012, 10), Figure("gone", "ppl", None, None, None)]
    assert line(own, 3) == "tasks after round 3: arc acc 0.2500 ± 0.0120, gone ppl not finite"
    assert line(own, -1).startswith("tasks before training: arc")
    many = [Figure(f"t{n}", "acc", 0.5, None, 1) for n in range(SHOWN + 2)]
    assert line(many).endswith(f"t{SHOWN - 1} acc 0.5000 and 2 more figures")


def test_models_side_by_side() -> None:
    base, tuned = Figure("arc", "acc", 0.25, None, 1000), Figure("arc", "acc", 0.5, None, 1000)
    other = Figure("piqa", "acc", 0.75, None, None)
    assert comparison({"base": [base], "tuned": [tuned, other]}) == [
        ["task", "metric", "examples", "base", "tuned"],
        ["arc", "acc", "1,000", "0.2500", "0.5000"],
        ["piqa", "acc", "-", "-", "0.7500"],
    ]
