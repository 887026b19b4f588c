"""The course of a run: rounds, slots and steps add up, whatever each round is like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.controller.choice import Choice, as_the_run_file_says
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.coordinator.server.ledger import Ledger
from dilocox.coordinator.server.plan_builder import RoundInputs, make_plan
from dilocox.coordinator.server.refusals import Refused
from tests.support.coordinator_driver import Driver, numbers, run_config

pytestmark = pytest.mark.waits


def choice(inner_steps: int, slots: int, delay: int) -> Choice:
    return Choice(inner_steps, slots, 1, delay, "int4", 0.8, 0.5, 1.0, 0.0, 1.0, "a test")


def course(steps: int, choices: list[Choice], overlap: str = "keep") -> list[RoundPlan]:
    """Plans from the first to the flush; the last of `choices` stays."""
    outer = {"rounds": None, "steps": steps, "inner_steps": 4, "overlap": overlap}
    config = run_config("ab", outer={**outer, "fragments": 1, "slots": 2} | {})
    plans: list[RoundPlan] = []
    tick = step = 0
    while not plans or plans[-1].kind != "flush":
        chosen = choices[min(len(plans), len(choices) - 1)]
        before = plans[-1] if plans else None
        inputs = RoundInputs(len(plans), tick, step, ["a", "b"], chosen, before=before)
        plan = make_plan(config, inputs, Ledger())
        plans.append(plan)
        tick, step = tick + plan.slots, step + plan.inner_steps
    return plans


lengths = st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)).map(
    lambda item: choice(item[0] * item[1], item[1], min(item[1], item[2]))
)


def test_a_round_has_the_fragments_that_were_chosen_and_the_flush_all_pieces() -> None:
    outer = {"rounds": 2, "inner_steps": 4, "fragments": 4}
    config = run_config("ab", outer=outer)
    chosen = replace(choice(4, 4, 1), fragments=2)
    plan = make_plan(config, RoundInputs(0, 0, 0, ["a", "b"], chosen), Ledger())
    flush = make_plan(config, RoundInputs(2, 8, 8, ["a", "b"], chosen), Ledger())
    assert (plan.kind, plan.fragments) == ("train", 2)
    assert (flush.kind, flush.fragments) == ("flush", 4)


@pytest.mark.parametrize(
    ("codec", "sent", "flushed", "decay"),
    [
        ("int2", "int2+moments", "int8", 1.0),
        ("topk:8", "topk:8+moments", "topk:8", 0.9),
        ("lowrank:4", "lowrank:4", "lowrank:4", 0.9),
    ],
)
def test_a_sparse_codec_keeps_to_itself_in_the_flush(
    codec: str, sent: str, flushed: str, decay: float
) -> None:
    chosen = replace(choice(4, 2, 1), codec=codec, residual_decay=0.9, residual_view=0.3)
    *rounds, flush = course(8, [chosen])
    assert {(plan.codec, plan.residual_decay) for plan in rounds} == {(sent, 0.9)}
    assert {plan.residual_view for plan in rounds} == {0.3}
    assert (flush.codec, flush.residual_decay) == (flushed, decay)


@pytest.mark.parametrize("sparse", ["topk:8", "cocktail", "lowrank:4"])
@pytest.mark.parametrize("dense", ["none", "int8", "int4", "int2"])
def test_what_a_sparse_codec_has_withheld_does_not_land_at_once(sparse: str, dense: str) -> None:
    """Where one follows that sends all there is, as when a site is alone or the link gets fast."""
    thin = replace(choice(4, 2, 1), codec=sparse, residual_decay=0.75)
    whole = replace(choice(4, 2, 1), codec=dense, residual_decay=1.0)
    decays = [plan.residual_decay for plan in course(16, [thin, thin, whole])]
    assert decays == [0.75, 0.75, 0.25, 1.0, 1.0]
    # From one sparse codec to another nothing is dropped, nor from one that is not.
    other = replace(thin, codec="topk:16")
    assert [p.residual_decay for p in course(12, [thin, other])] == [0.75] * 4
    assert [p.residual_decay for p in course(12, [whole, thin])] == [1.0, 0.75, 0.75, 0.75]


@pytest.mark.parametrize("sparse", ["topk:8", "cocktail", "lowrank:4"])
def test_the_flush_goes_by_the_round_that_it_follows(sparse: str) -> None:
    """It sends what that round's plan has left, whatever would be chosen for one more round: sent
    by another's sparse codec, most of a dense round's last pseudo-gradient would be dropped."""
    thin = replace(choice(4, 2, 1), codec=sparse, residual_decay=0.75, learning_rate=1.5)
    whole = replace(choice(4, 2, 1), codec="int4", residual_decay=1.0)
    *_, flush = course(8, [thin, thin, whole])
    assert (flush.codec, flush.learning_rate, flush.residual_decay) == (sparse, 1.5, 0.75)
    *_, flush = course(8, [whole, whole, thin])
    assert (flush.codec, flush.learning_rate, flush.residual_decay) == ("int8", 0.8, 1.0)


@pytest.mark.parametrize(("overlap", "momentum"), [("none", 0.0), ("keep", 0.5)])
def test_where_nothing_was_trained_the_flush_has_no_momentum(overlap: str, momentum: float) -> None:
    """With overlap none all pseudo-gradients have landed: an outer step with momentum would move
    the model by what older ones have left in it."""
    chosen = replace(choice(4, 2, 1), delay=0 if overlap == "none" else 1)
    *rounds, flush = course(8, [chosen], overlap)
    assert {plan.momentum for plan in rounds} == {0.5}
    assert flush.momentum == momentum
    # A fragment whose boundary was in the middle of the round has been trained since.
    *_, flush = course(8, [replace(chosen, fragments=2)], overlap)
    assert flush.momentum == 0.5


@pytest.mark.parametrize("sparse", ["topk:8", "cocktail", "lowrank:4"])
def test_with_a_beta_of_one_nothing_withheld_is_ever_lost(sparse: str) -> None:
    thin = replace(choice(4, 2, 1), codec=sparse, residual_decay=1.0)
    whole = replace(thin, codec="int4")
    assert [plan.residual_decay for plan in course(16, [thin, thin, whole])] == [1.0] * 5


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 100), st.lists(lengths, min_size=1, max_size=4))
def test_inner_steps_add_up_and_then_comes_the_flush(steps: int, choices: list[Choice]) -> None:
    plans = course(steps, choices)
    *rounds, flush = plans
    assert sum(plan.inner_steps for plan in rounds) == steps == flush.first_step
    assert [plan.kind for plan in rounds] == ["train"] * len(rounds)
    assert (flush.kind, flush.inner_steps, flush.slots, flush.codec) == ("flush", 0, 0, "int8")
    assert [plan.last for plan in plans] == [False] * (len(rounds) - 1) + [True, True]
    for number, (plan, after) in enumerate(zip(rounds, plans[1:], strict=True)):
        wanted = choices[min(number, len(choices) - 1)]
        assert plan.inner_steps == min(wanted.inner_steps, steps - plan.first_step)
        assert plan.inner_steps % plan.slots == 0
        assert 1 <= plan.delay <= plan.slots
        assert (after.first_tick, after.first_step) == (
            plan.first_tick + plan.slots,
            plan.first_step + plan.inner_steps,
        )
        assert len(numbers(plan)) == 2 * 4 * plan.inner_steps


@pytest.mark.parametrize(
    ("whole", "left", "overlap", "expected"),
    [
        # slots keep their length where whole ones fit
        ((20, 4, 2), 10, "keep", (10, 2, 2)),
        ((20, 4, 1), 10, "keep", (10, 2, 1)),
        # else they are one inner step each, and the delay stays the same time
        ((20, 4, 2), 12, "keep", (12, 12, 10)),
        ((20, 4, 4), 3, "keep", (3, 3, 3)),
        ((20, 1, 1), 3, "naive", (3, 1, 1)),
        ((20, 4, 4), 10, "eager", (10, 2, 2)),
        ((20, 1, 0), 7, "none", (7, 1, 0)),
        ((20, 20, 5), 20, "keep", (20, 20, 5)),
    ],
)
def test_a_round_that_is_cut_short(
    whole: tuple[int, int, int], left: int, overlap: str, expected: tuple[int, int, int]
) -> None:
    cut = choice(*whole).shortened(left, overlap)
    assert (cut.inner_steps, cut.slots, cut.delay) == expected
    assert ("cut to" in cut.reason) == (left < whole[0])


def test_a_run_in_steps_ends_in_the_middle_of_a_round(tmp_path: Path) -> None:
    config = run_config("ab", outer={"rounds": None, "steps": 10})
    driver = Driver(tmp_path, config)
    driver.start()
    seen = []
    for round_ in range(4):
        plan = driver.plan(round_, "a")
        assert plan is not None
        seen.append((plan.kind, plan.first_step, plan.inner_steps, plan.last))
        for site in "ab":
            driver.round_done(site, round_)
    assert seen == [
        ("train", 0, 4, False), ("train", 4, 4, False), ("train", 8, 2, True),
        ("flush", 10, 0, True),
    ]  # fmt: skip
    with pytest.raises(Refused, match="ends with the flush after 10 inner steps"):
        driver.plan(4, "a")


def test_checkpoints_and_evaluations_are_as_far_apart_whatever_is_chosen() -> None:
    """Every 2 rounds of the run file's 4 inner steps."""
    config = run_config(
        "ab",
        outer={"rounds": None, "steps": 40, "inner_steps": 4},
        checkpoint={"every_rounds": 2},
        evaluation={"every_rounds": 3},
    )
    for steps in (1, 3, 4, 8):
        found = []
        for round_, first in enumerate(range(0, 40, steps)):
            inputs = RoundInputs(round_, first, first, ["a"], choice(steps, steps, 1))
            plan = make_plan(config, inputs, Ledger())
            found.append((plan.checkpoint, plan.evaluate))
        ends = [min(40, first + steps) for first in range(0, 40, steps)]
        kept = [end for end, (checkpoint, _) in zip(ends, found, strict=True) if checkpoint]
        assert kept == [next(e for e in ends if e >= due) for due in (8, 16, 24, 32)]
        evaluated = [end for end, (_, evaluate) in zip(ends, found, strict=True) if evaluate]
        assert evaluated == [
            e for e in (next(e for e in ends if e >= d) for d in (12, 24, 36)) if e < 40
        ]


def test_a_fixed_plan_is_the_run_files() -> None:
    config = run_config("ab", outer={"learning_rate": 0.6, "delay": 3})
    fixed = as_the_run_file_says(config)
    assert (fixed.inner_steps, fixed.slots, fixed.delay, fixed.learning_rate) == (4, 4, 3, 0.6)
    assert fixed.reason == "as the run file says"


def test_slow_sites_take_fewer_steps_and_no_sequence_twice() -> None:
    config = run_config("ab", outer={"rounds": 3, "inner_steps": 5, "fragments": 1, "slots": 5})
    ledger = Ledger()
    before: RoundPlan | None = None
    steps, rows = [], []
    for round_ in range(4):
        inputs = RoundInputs(
            round_, 5 * round_, 5 * round_, ["a", "b"],
            as_the_run_file_says(config), paces={"a": 1000, "b": 500}, before=before,
        )  # fmt: skip
        plan = make_plan(config, inputs, ledger)
        steps.append([member.steps(plan.inner_steps) for member in plan.members.values()])
        rows += numbers(plan)
        for site, member in plan.members.items():
            assert sum(count for _, count in member.ranges) == 4 * member.steps(plan.inner_steps)
            ledger.issue(site, 1, round_, member.space, member.ranges)
        before = plan
    # Two steps and a half a round: the half is carried on.
    assert steps == [[5, 2], [5, 3], [5, 2], [0, 0]]
    assert sorted(rows) == list(range(4 * 22))


@pytest.mark.parametrize(("rule", "expected"), [("tokens", [4 / 3, 2 / 3]), ("equal", [1, 1])])
def test_weights_follow_the_run_file(rule: str, expected: list[float]) -> None:
    config = run_config("ab", control={"adapt": "off", "weights": rule})
    paces = {"a": 1000, "b": 500}
    inputs = RoundInputs(0, 0, 0, ["a", "b"], as_the_run_file_says(config), paces=paces)
    plan = make_plan(config, inputs, Ledger())
    assert [member.weight for member in plan.members.values()] == pytest.approx(expected)
