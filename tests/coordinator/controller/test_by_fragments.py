"""The controller: how many fragments a round's pieces are exchanged as."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dilocox.coordinator.controller import link_policy
from dilocox.coordinator.controller.candidates import TOGETHER, candidates, codecs, fragments_of
from dilocox.coordinator.controller.link_estimator import Estimate, Sample, estimated
from dilocox.coordinator.controller.link_policy import FEWER_WORTH, choose
from tests.coordinator.controller.test_link_policy import at, plan_of
from tests.support.controller_inputs import Play, chosen, menu, run_config


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


@pytest.mark.parametrize("steps", [3300, 5000])
@pytest.mark.parametrize("rate", [1e6, 1e7])
def test_encoding_that_grows_with_a_fragment_does_not_make_it_swing(
    steps: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its transfer an exchange takes 5 ms, and the codec's time for what it holds: one
    fragment's is four times that of a quarter. Any gain is enough here."""
    monkeypatch.setattr(link_policy, "FEWER_WORTH", 0.0)

    def plans() -> set[tuple[int, str, int, int]]:
        play = Play(run_config(steps=steps), lambda _: rate)
        for _ in range(40):
            each = 5_000 + 100_000 // play.round().fragments
            play.samples[-1] = replace(play.samples[-1], overhead_us=each)
        return {chosen(choice) for choice in play.choices[20:]}

    assert len(plans()) == 1
    # Were what is measured at one number taken for all, it would.
    monkeypatch.setattr(Estimate, "overhead_of", lambda self, _: self.overhead_us)
    assert len(plans()) > 1


@pytest.mark.parametrize("rate", [250, 300])
@pytest.mark.parametrize("jam", [1_000_000, 3_000_000])
def test_after_a_jam_the_plan_is_what_it_was(rate: int, jam: int) -> None:
    """All exchanges take seconds for five rounds. What was measured then with one number of
    fragments says as much of the others."""
    config = run_config()
    play = Play(config, lambda _: rate)
    play.menu = menu(config, 100_000)
    for number in range(50):
        play.round()
        beside = jam if 15 <= number < 20 else 20_000
        play.samples[-1] = replace(play.samples[-1], overhead_us=beside)
    before, after = play.choices[14], play.choices[-1]
    assert before.fragments < 4
    assert chosen(after) == chosen(before)


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
    # A codec that the run file sets is no reason; its sizes come with those of `none`.
    own = run_config(compression={"codec": "top1:1800"})
    assert fragments_of(own, "top1:1800", sizes) == [4, 2, 1]


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
    # Twice as long with one number is twice as long with all; nobody knows of none.
    slower = estimated(
        then, [replace(fewer, overhead_us=600)], control, earlier=[replace(fewer, overhead_us=600)]
    )
    assert slower is not None
    assert dict(slower.overheads) == {4: 512, 2: 1024}
    assert slower.overhead_of(0) == 1024
    assert [then.overhead_of(number) for number in (8, 4, 2, 1)] == [128, 128, 256, 512]
    # A number that was not measured counts as one, whatever it says.
    assert Estimate(1, 1, 0, 0, overhead_us=7).overhead_of(3) == 7
