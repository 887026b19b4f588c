"""Who makes the rounds' plans in a simulated run: the same controller as in a real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.candidates import Menu
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.decide import Decided, Measurements, decide
from dilocox.coordinator.protocol.step_share import carried, steps_taken


@dataclass(frozen=True)
class SimPlan:
    """What is decided for a round."""

    choice: Choice
    """Cut to the steps that are left."""
    paces: dict[str, int]
    carries: dict[str, int]
    """By site; see `dilocox.coordinator.controller.pace`."""

    def steps(self, site: str, count: int) -> int:
        """Inner steps of `site` while the typical one takes `count` from the round's beginning."""
        return steps_taken(self.paces[site], self.carries[site], count)


@dataclass
class Chooser:
    """Makes a plan per round from what simulated sites measure.

    `menu` holds the payload sizes of all codecs that the controller may choose, if it goes by the
    link. The effective rank cannot be known without gradients: `effective-rank` stays in warm-up.
    """

    config: RunConfig
    menu: Menu
    sites: Sequence[str]
    plans: list[SimPlan] = field(default_factory=list)
    _before: Decided | None = None
    _left: dict[str, int] = field(default_factory=dict)
    """What the round before has left of a step, by site."""

    def choose(self, measured: Measurements, left: int) -> SimPlan:
        """The plan of the next round, of `left` inner steps at most.

        `measured`: all that the sites have measured so far; the controller looks no further than
        it may.
        """
        config = self.config
        paces, choice, estimate = decide(
            config, self.menu, len(self.plans), self.sites, measured, [], self._before
        )
        choice = choice.shortened(left, config.outer.overlap)
        carries = {}
        for site, pace in paces.items():
            carries[site], self._left[site] = carried(
                pace, self._left.get(site, 0), choice.inner_steps
            )
        self.plans.append(SimPlan(choice, paces, carries))
        self._before = Decided(choice.inner_steps, choice.codec, choice.fragments, paces, estimate)
        return self.plans[-1]
