"""The controller: how many fragments a round's pieces are exchanged as."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dilocox.outer.controller.by_link import FEWER_WORTH, choose
from dilocox.outer.controller.candidates import TOGETHER, candidates, codecs, fragments_of
from dilocox.outer.controller.link import Estimate, Sample, estimated
from tests.outer.controller.helpers import Play, chosen, menu, run_config
from tests.outer.controller.test_by_link import at, plan_of


def test_pieces_travel_together_where_that_is_clearly_less_lossy() -> None:
    """Of a small model on a slow link headers are a quarter of what is sent."""
    config = run_config()
    sizes = menu(config, 100_000)
    slow = at(250, 1_000_000)
    choice = choose(config, sizes, slow, 2, None)
    assert choice.fragments < 4
    of_all = [c for c in candidates(config, sizes, slow, 2) if c.fits]
    apart = min(c.loss for c in of_all if c.fragments == 4)
    assert min(c.loss for c in of_all if plan_of(c) == plan_of(choice)) <= apart - FEWER_WORTH
    assert choose(config, menu(config), at(1e6), 2, None).fragments == 4
    # A round trip that the run file declares is paid once for all.
    link = {"link": "8mbit", "step_seconds": 0.05, "latency": 0.1}
    near = run_config(control=link)
    short = choose(near, menu(near), at(1e6, 50_000), 2, None)
    assert short.fragments < 4
    pinned = run_config(outer={"fragments": 4}, control=link)
    longer = choose(pinned, menu(pinned), at(1e6, 50_000), 2, None)
    assert longer.fragments == 4
    assert longer.inner_steps > short.inner_steps


@pytest.mark.parametrize("steps", [600, 3300])
@pytest.mark.parametrize("coding_us", [40_000, 100_000])
@pytest.mark.parametrize("rate", [3e4, 1e6, 1e7])
def test_encoding_that_grows_with_a_fragment_does_not_make_it_swing(
    steps: int, coding_us: int, rate: float
) -> None:
    """Beside its transfer an exchange takes 5 ms, and the codec's time for what it holds: one
    fragment's is four times that of a quarter."""
    play = Play(run_config(steps=steps), lambda _: rate)
    for _ in range(50):
        each = 5_000 + coding_us // play.round().fragments
        play.samples[-1] = replace(play.samples[-1], overhead_us=each)
    settled = [chosen(choice) for choice in play.choices[20:]]
    assert len(set(settled)) == 1


@pytest.mark.parametrize(
    "sections",
    [
        {"outer": {"fragments": 4}},
        {"admission": {"gate": True}},
        {"admission": {"aggregation": "clip"}},
    ],
)
def test_where_fragments_stay_as_many_as_there_are_pieces(sections: dict[str, Any]) -> None:
    config = run_config(**sections)
    sizes = menu(config)
    assert {f for codec in codecs(config) for f in fragments_of(config, codec, sizes)} == {4}
    free = run_config()
    assert fragments_of(free, "int4", sizes) == [4, 2, 1]
    assert fragments_of(free, "lowrank:8", sizes) == [4]
    # What is under way must not take much more memory than pieces apart.
    large = menu(free, 8 * TOGETHER // 5)
    assert fragments_of(free, "int4", large) == [4, 2]
    assert fragments_of(free, "int4", {"int4": large["int4"]}) == [4]


def test_what_passes_beside_transfers_is_known_by_the_number_of_fragments() -> None:
    """Of others nothing is hoped for."""
    control = run_config().control
    sample = Sample(1000, 4000, 4000, 4, overhead_us=100, fragments=4)
    first = estimated(None, [sample], control)
    assert first is not None
    assert (first.overhead_us, dict(first.overheads)) == (128, {4: 128})
    assert [first.overhead_of(number) for number in (8, 4, 2, 1)] == [128, 128, 256, 512]
    fewer = replace(sample, overhead_us=150, fragments=2)
    then = estimated(first, [fewer], control, earlier=[sample])
    assert then is not None
    assert dict(then.overheads) == {4: 128, 2: 256}
    assert [then.overhead_of(number) for number in (8, 4, 2, 1)] == [128, 128, 256, 512]
    # A number that was not measured counts as one, whatever it says.
    assert Estimate(1, 1, 0, 0, overhead_us=7).overhead_of(3) == 7
