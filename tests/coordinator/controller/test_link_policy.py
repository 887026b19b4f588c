"""The controller: what hides, what is least lossy of it, and that it comes to rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.codec_spec import parse_spec
from dilocox.coordinator.controller.candidates import (
    INNER_STEPS,
    Candidate,
    candidate,
    candidates,
    codecs,
)
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.link_policy import (
    FEWER_WORTH,
    WORTH,
    Now,
    choose,
    starting_choice,
)
from dilocox.coordinator.controller.loss_model import outer_rates, residual_decay, residual_view
from tests.support.controller_inputs import Play, at, chosen, menu, run_config

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
rates = st.floats(3.5, 9.5).map(lambda power: 10**power)
noise = st.lists(st.floats(0.9, 1.1), min_size=30, max_size=30)


def plan_of(each: Choice | Candidate) -> Now:
    return each.inner_steps, each.codec, each.fragments


@PROPERTY
@given(
    rate=rates,
    step_us=st.integers(1_000, 10_000_000),
    sites=st.integers(2, 6),
    exchange=st.sampled_from(["gather", "reduce"]),
    stages=st.integers(1, 3),
    latency=st.sampled_from([0.0, 0.02]),
)
def test_the_least_lossy_plan_that_hides_is_chosen(
    rate: float, step_us: int, sites: int, exchange: str, stages: int, latency: float
) -> None:
    config = run_config(
        outer={"exchange": exchange},
        site={"stages": stages, "batch_size": 16, "micro_batch_size": 1},
        control={"latency": latency, "link": "1gbit", "step_seconds": 1.0} if latency else {},
    )
    sizes, link = menu(config), at(rate, step_us)
    choice = choose(config, sizes, link, sites, None)
    every = candidates(config, sizes, link, sites)
    own = next((c for c in every if plan_of(c) == plan_of(choice)), None)
    fitting = [c for c in every if c.fits]
    if not fitting:
        assert own is None or not own.fits
        return
    assert own is not None
    assert own.fits
    # Fewer fragments than there are pieces are taken where they are clearly better.
    assert own.loss == min(c.loss for c in fitting if c.fragments == own.fragments)
    assert own.loss < min(c.loss for c in fitting) + FEWER_WORTH
    # Hidden, with the share of the time left free that the run file asks for.
    assert own.traffic.busy_us <= 0.9 * own.round_us
    assert own.traffic.latest_us <= 0.9 * choice.delay * own.round_us / choice.slots + 1
    assert choice.delay == own.delay <= choice.slots == choice.inner_steps


@PROPERTY
@given(st.tuples(rates, rates), st.integers(2, 5))
def test_a_faster_link_never_costs_loss(two: tuple[float, float], sites: int) -> None:
    config = run_config()
    sizes = menu(config)
    found = []
    for rate in sorted(two):
        choice = choose(config, sizes, at(rate), sites, None)
        fitting = [c for c in candidates(config, sizes, at(rate), sites) if c.fits]
        match = [c.loss for c in fitting if plan_of(c) == plan_of(choice)]
        found.append(match[0] if match else float("inf"))
    assert found[0] + FEWER_WORTH >= found[1]


@settings(PROPERTY, max_examples=25)
@given(rates, noise, noise, st.sampled_from([0.0, 5_000.0, 50_000.0]), st.integers(2, 4))
def test_it_comes_to_rest_on_a_noisy_link(
    rate: float, link: list[float], steps: list[float], latency: float, sites: int
) -> None:
    """Within 10 % up or down, in bytes per second and in seconds per step, nothing changes."""
    play = Play(
        run_config(),
        lambda t: rate * link[t],
        lambda t: 100_000 * steps[t],
        latency_us=latency,
        sites=sites,
    )
    choices = play.run(30)
    settled = choices[12]
    assert {chosen(choice) for choice in choices[12:]} == {chosen(settled)}
    if latency == 0:
        # Rate and step time are told by one measurement: the first plan that sees it is the last.
        assert {chosen(choice) for choice in choices[2:]} == {chosen(settled)}


@settings(PROPERTY, max_examples=15)
@given(rates, noise, st.floats(2.0, 30.0), st.sampled_from([8, 11, 14]), st.integers(2, 4))
def test_one_round_that_a_machine_was_busy_in_changes_nothing(
    rate: float, link: list[float], factor: float, odd: int, sites: int
) -> None:
    """Its steps and exchanges took longer, be it by a checkpoint or by others on the machine."""

    def in_odd_rounds(usual: float) -> Callable[[int], float]:
        return lambda t: usual * (factor if t == odd else 1.0)

    play = Play(
        run_config(),
        lambda t: rate * link[t],
        in_odd_rounds(100_000.0),
        sites=sites,
        beside_us=in_odd_rounds(20_000.0),
    )
    choices = play.run(20)
    assert {chosen(choice) for choice in choices[odd:]} == {chosen(choices[odd])}


@settings(PROPERTY, max_examples=15)
@given(rates, st.floats(2.0, 30.0))
def test_a_machine_that_stays_slower_is_believed_a_round_later(rate: float, factor: float) -> None:
    turn = 8
    play = Play(run_config(), lambda _: rate, lambda t: 100_000 * (factor if t >= turn else 1.0))
    play.run(turn + 3)
    assert play.estimate is not None
    assert play.estimate.step_us == 100_000
    play.round()  # the first plan that can look at two such rounds
    assert play.estimate.step_us == round(100_000 * factor)


@PROPERTY
@given(rates, st.sampled_from([10.0, 0.1]), noise)
def test_a_link_ten_times_slower_or_faster_is_answered_at_once(
    rate: float, factor: float, link: list[float]
) -> None:
    turn = 8
    play = Play(run_config(), lambda t: rate * link[t] * (factor if t >= turn else 1))
    play.run(turn + 2)
    before = play.choices[-1]
    after = play.round()  # the first plan that can look at round `turn`
    new = rate * link[turn] * factor
    best = choose(play.config, play.menu, at(new), 2, None)
    if chosen(best)[:2] != chosen(before)[:2] and factor < 1 and not play.fits(before, new):
        assert chosen(after) != chosen(before)
        # What hides at all on the new link hides now.
        assert play.fits(after, new) or not play.fits(best, new)
    # Upwards in two: a single fast round is not believed whole.
    last = play.run(2)[-1]
    gap = _loss(play, last, new) - _loss(play, best, new)
    assert gap < WORTH + 0.25 * _loss(play, best, new)
    if factor > 1 and _loss(play, before, new) - _loss(play, best, new) > 0.02:
        assert chosen(after) != chosen(before)
        assert _loss(play, after, new) < _loss(play, before, new)


def _loss(play: Play, choice: Choice, rate: float) -> float:
    return candidate(
        play.config, play.menu[choice.codec], choice.codec, choice.inner_steps, at(rate), 2
    ).loss


def test_a_link_that_changes_back_and_forth_is_followed() -> None:
    def rate(t: int) -> float:
        return 1e7 if t // 10 % 2 == 0 else 1e5

    play = Play(run_config(), rate)
    choices = play.run(40)
    fast, slow = choices[9], choices[19]
    assert chosen(fast) != chosen(slow)
    assert chosen(choices[39]) == chosen(slow)
    # On the way up, what is hardly better is not changed for.
    assert _loss(play, choices[29], 1e7) - _loss(play, fast, 1e7) < WORTH
    changes = [t for t in range(2, 40) if chosen(choices[t]) != chosen(choices[t - 1])]
    # Down at once; up by four times a round at most, which is enough in three.
    assert [t for t in changes if 10 <= t < 20] == [12]
    assert 22 in changes
    assert not [t for t in changes if 20 <= t < 22 or 25 <= t < 30]


def test_it_begins_with_the_methods_values() -> None:
    first, second, third = Play(run_config(), lambda _: 1e6).run(3)
    for choice in (first, second):
        assert (choice.inner_steps, choice.codec, choice.delay) == (20, "int4", 5)
        assert choice.reason == "nothing is measured yet"
    assert "kB take" in third.reason
    assert "at 8 Mbit/s and 100 ms a step, predicted loss +" in third.reason
    slow = replace(at(1e6), overhead_us=32_768)
    reason = choose(run_config(), menu(run_config()), slow, 2, None).reason
    assert "at 8 Mbit/s, 32.8 ms beside that per exchange, and 100 ms a step" in reason
    short = starting_choice(run_config(steps=41), "")
    # Eight rounds at least, where that is possible.
    assert (short.inner_steps, short.slots, short.delay) == (5, 5, 1)
    assert starting_choice(run_config(steps=3), "").inner_steps == 1


def test_after_a_handover_eight_rounds_are_left_of_what_is_left() -> None:
    config = run_config(steps=3300)
    # 300 steps: rounds of 37 at most.
    assert starting_choice(config, "", taken=3000).inner_steps == 20
    assert starting_choice(config, "", taken=3200).inner_steps == 12
    pinned = run_config(steps=3300, compression={"codec": "int4"})
    for rate, steps, of_the_rest in ((2e5, 50, 30), (1.6e5, 80, 80), (3e4, 200, 125)):
        whole, rest = (
            choose(pinned, menu(pinned), at(rate), 2, None, taken=taken) for taken in (0, 3000)
        )
        assert (whole.inner_steps, rest.inner_steps) == (steps, of_the_rest)
        assert "fewer than 8 rounds" not in whole.reason
        assert ("fewer than 8 rounds" in rest.reason) == (of_the_rest == 80)


def test_a_single_site_has_nothing_to_adapt_to() -> None:
    config = run_config(sites="a")
    choice = choose(config, menu(config), at(1e6), 1, (20, "int4", 4))
    assert (choice.inner_steps, choice.codec) == (20, "none")  # nothing is lost for nobody
    assert choice.reason == "one site: nothing is exchanged"
    pinned = run_config(sites="a", compression={"codec": "int4"})
    assert choose(pinned, menu(pinned), at(1e6), 1, (20, "int4", 4)).codec == "int4"


@pytest.mark.parametrize(("steps", "kind"), [(600, "topk"), (5000, "top1")])
@settings(PROPERTY, max_examples=20)
@given(rates, st.floats(1e3, 1e6), st.floats(1.5, 4.0), st.integers(2, 4))
def test_codecs_that_compute_more_than_others_do_not_make_it_swing(
    steps: int, kind: str, rate: float, work: float, dearer: float, sites: int
) -> None:
    """Rounds of them take several times the work of int4's: whatever it takes to find out."""
    play = Play(
        run_config(steps=steps),
        lambda _: rate,
        sites=sites,
        work_us=lambda codec: work * (dearer if parse_spec(codec).kind == kind else 1.0),
    )
    assert kind in {parse_spec(codec).kind for codec in play.menu}
    choices = play.run(40)
    assert len({chosen(choice) for choice in choices[20:]}) == 1


@pytest.mark.parametrize("steps", [600, 3300])
@pytest.mark.parametrize("codec", ["topk:20", "top1:512", "int4"])
def test_rates_go_with_the_first_plan_as_with_any(codec: str, steps: int) -> None:
    config = run_config(steps=steps, compression={"codec": codec})
    first = starting_choice(config, "")
    assert (first.inner_steps, first.codec) == (20, codec)
    assert (first.learning_rate, first.momentum) == outer_rates(20, codec, steps)
    assert first.residual_decay == residual_decay(20, codec, steps)
    assert first.residual_view == residual_view(20, codec, steps)
    alone = choose(config, menu(config), None, 1, None)
    assert replace(alone, reason="") == first
    own = {"learning_rate": 0.6, "momentum": 0.2}
    pinned = run_config(steps=steps, compression={"codec": codec}, outer=own)
    kept = starting_choice(pinned, "")
    assert (kept.learning_rate, kept.momentum) == (0.6, 0.2)
    assert kept.residual_decay == first.residual_decay


def test_a_codec_of_unknown_loss_is_chosen_only_where_it_is_pinned() -> None:
    paper = {"method": "dilocox-paper", "overlap": "keep", "fragments": 4, "inner_steps": 20}
    config = run_config(outer=paper, control={"adapt": "link", "pinned": []})
    assert not [codec for codec in codecs(config) if codec.startswith("lowrank")]
    for codec, pinned, there in (
        ("lowrank:16", [], False), ("lowrank:16", ["codec"], True), ("fp16", [], True),
    ):  # fmt: skip
        config = run_config(compression={"codec": codec}, control={"pinned": pinned})
        assert (codec in codecs(config)) is there


def test_a_prediction_says_what_it_leaves_out() -> None:
    for codec, told in (
        ("lowrank:16", "and what lowrank:16 adds, not known"),
        ("int4", "% (rough, from small models)"),
    ):
        config = run_config(compression={"codec": codec}, control={"pinned": ["codec"]})
        choice = choose(
            config, dict.fromkeys([codec], menu(run_config())["int4"]), at(1e6), 2, None
        )
        assert choice.codec == codec
        assert choice.reason.endswith(told), choice.reason


def test_the_smallest_share_of_a_link_is_a_share() -> None:
    config = run_config(steps=100_000, control={"utilisation": 1e-4, "work": 1.0})
    choice = choose(config, menu(config, 10_000), at(1e7), 2, None)
    assert "nothing hides" not in choice.reason
    assert choice.delay < choice.slots


def test_the_exchanges_own_work_is_kept_small() -> None:
    """At most 3 % of computation, but never at the price of the last eight rounds."""
    config = run_config()
    sizes = menu(config)
    free = choose(config, sizes, at(1e9), 2, None)
    assert free.inner_steps == 1
    busy = replace(at(1e9), work_us=20_000)
    choice = choose(config, sizes, busy, 2, None)
    assert choice.inner_steps == 8  # 20 ms of 800 ms
    # One that is in force may take a quarter more before it is given up.
    assert (
        choose(config, sizes, replace(at(1e9), work_us=29_000), 2, (8, "none", 4)).inner_steps == 8
    )
    choice = choose(config, sizes, replace(at(1e9), work_us=31_000), 2, (8, "none", 4))
    assert choice.inner_steps == 12
    assert choice.reason.endswith(
        "; the own work of 8 steps of none in 4 fragments would take 3.9%"
    )
    heavy = replace(at(1e9), work_us=900_000)
    choice = choose(config, sizes, heavy, 2, None)
    assert (choice.inner_steps, choice.codec) == (50, "none")
    assert choice.reason.endswith("its own work takes 18% of computation, more than asked for")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"outer": {"inner_steps": 12}}, {"inner_steps": 12}),
        ({"compression": {"codec": "int8"}}, {"codec": "int8"}),
        ({"compression": {"codec": "fp16"}}, {"codec": "fp16"}),
        ({"outer": {"delay": 7}}, {"delay": 7}),
        (
            {"outer": {"learning_rate": 0.6, "momentum": 0.2}},
            {"learning_rate": 0.6, "momentum": 0.2},
        ),
        ({"compression": {"residual_decay": 0.7}}, {"residual_decay": 0.7}),
        ({"compression": {"residual_view": 0.4}}, {"residual_view": 0.4}),
        ({"outer": {"keep": 0.3}}, {"keep": 0.3}),
    ],
)
@pytest.mark.parametrize("rate", [1.0, 2e4, 1e6, 1e9])
def test_what_the_run_file_sets_stays(
    sections: dict[str, Any], expected: dict[str, Any], rate: float
) -> None:
    config = run_config(**sections)
    choice = choose(config, menu(config), at(rate), 2, None)
    found = {key: getattr(choice, key) for key in expected}
    if "delay" in expected:  # never more than a round
        expected = {"delay": min(7, choice.slots)}
    assert found == expected


def test_a_slot_keeps_its_length() -> None:
    config = run_config(outer={"inner_steps": 20, "slots": 4}, control={"pinned": []})
    for rate in (1e4, 1e5, 1e6, 1e9):
        choice = choose(config, menu(config), at(rate), 2, None)
        assert choice.inner_steps == 5 * choice.slots


def test_without_error_feedback_nothing_below_four_bits() -> None:
    config = run_config(compression={"error_feedback": False})
    assert set(menu(config)) == {"none", "int8", "int4"}
    assert "topk:5" not in menu(run_config(outer={"exchange": "reduce"}))


def test_top1_is_on_the_menu_where_few_values_travel_and_of_long_runs_and_taken_there() -> None:
    short, long = run_config(), run_config(steps=3300)
    thin = codecs(short)[codecs(short).index("topk:7") :]
    assert thin[:2] == ["topk:7", "top1:700"]
    assert len(thin) == 9
    assert "top1:590" in codecs(long)
    assert not [codec for codec in codecs(long) if codec.startswith("topk")]
    for other in ({"outer": {"exchange": "reduce"}}, {"inner": {"optimizer": "muon"}}):
        changed = run_config(steps=3300, **other)
        assert not [codec for codec in codecs(changed) if codec.startswith("top1")]
    choice = choose(long, menu(long), at(20_000), 2, None)
    assert parse_spec(choice.codec).kind == "top1"
    rates = outer_rates(choice.inner_steps, choice.codec, 3300)
    assert (choice.learning_rate, choice.momentum) == rates
    assert choice.residual_view > 0
    assert choose(short, menu(short), at(400_000), 2, None).codec.startswith("topk:")
    assert choose(short, menu(short), at(2_000), 2, None).codec.startswith("top1:")


def test_a_plan_in_force_that_still_fits_outlives_all_that_could_be_new() -> None:
    """No new plan leaves a tenth of the link free; the one in force may use all of it."""
    config = run_config(steps=1000)
    sizes = menu(config)
    key, seen = (125, "top1:2600", 1), 0
    for rate in range(50, 100):
        now = candidate(config, sizes[key[1]], key[1], key[0], at(rate), 2, key[2], True)
        if now.fits and not any(c.fits for c in candidates(config, sizes, at(rate), 2)):
            kept = choose(config, sizes, at(rate), 2, key)
            assert plan_of(kept) == key
            seen += 1
    assert seen > 2
    # So does one with fewer than eight rounds.
    rate = 50
    long = choose(config, sizes, at(rate), 2, None)
    assert long.inner_steps > 125
    again = choose(config, sizes, at(0.97 * rate), 2, plan_of(long))
    assert plan_of(again) == plan_of(long)


def test_outer_rates_follow_the_inner_steps() -> None:
    config = run_config()
    fast = choose(config, menu(config), at(1e10), 2, None)
    rates = fast.learning_rate, fast.momentum
    assert fast.inner_steps == 1
    assert rates == outer_rates(1, fast.codec, config.total_steps)
    slow = choose(config, menu(config), at(2e3), 2, None)
    assert slow.inner_steps >= 5
    rates = slow.learning_rate, slow.momentum
    assert rates == outer_rates(slow.inner_steps, slow.codec, config.total_steps)
    assert all(steps in INNER_STEPS for steps in (fast.inner_steps, slow.inner_steps))


def test_a_plan_in_force_may_use_up_what_a_new_one_leaves_free() -> None:
    config = run_config()
    sizes = menu(config)
    for rate in (3e4, 1e5, 1e6):
        now = choose(config, sizes, at(rate), 2, None)
        key, own = plan_of(now), sizes[now.codec]
        slower = rate * candidate(config, own, now.codec, key[0], at(rate), 2, key[2]).load
        barely = at(slower * 1.01)
        kept = choose(config, sizes, barely, 2, key)
        same = candidate(config, own, now.codec, key[0], barely, 2, key[2], in_force=True)
        assert same.fits
        if kept.codec != now.codec:  # landing later, it costs more than the one that was taken
            steps, codec, number = plan_of(kept)
            better = candidate(config, sizes[codec], codec, steps, barely, 2, number)
            assert same.loss - better.loss >= WORTH
        assert choose(config, sizes, barely, 2, None).codec != now.codec
        assert choose(config, sizes, at(slower * 0.98), 2, key).codec != now.codec


def test_a_plan_in_force_keeps_its_room_while_the_round_is_long_enough() -> None:
    config = run_config()
    sizes = menu(config)
    for rate in (3e4, 1e5, 3e5, 1e6):
        for faster in (1.0, 1.05, 1.2):
            link = at(rate * faster)
            now = choose(config, sizes, at(rate), 2, None)
            kept = choose(config, sizes, link, 2, plan_of(now))
            steps, codec, number = plan_of(kept)
            new = candidate(config, sizes[codec], codec, steps, link, 2, number)
            assert kept.delay == new.delay
            assert new.traffic.latest_us <= 0.9 * kept.delay * new.round_us / kept.slots + 1


def test_a_plan_that_fits_gives_way_only_to_a_better_one() -> None:
    config = run_config()
    sizes = menu(config)
    # int4 every step hides easily, and dense would be a twentieth of a per cent better.
    kept = choose(config, sizes, at(1e9), 2, (1, "int4", 4))
    assert kept.codec == "int4"
    moved = choose(config, sizes, at(1e9), 2, (20, "int4", 4))
    assert (moved.inner_steps, moved.codec) == (1, "none")
    assert "less than 20 steps of int4 in 4 fragments" in moved.reason
    down = choose(config, sizes, at(1e5), 2, (1, "none", 4))
    assert "; 1 step of none in 4 fragments would take" in down.reason
