"""Makes the plans of a simulated run's rounds, with the same controller as a real run."""

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
    """The plan of one simulated round."""

    choice: Choice
    """Shortened if fewer inner steps are left in the run."""
    paces: dict[str, int]
    """Speed by site, in thousandths of the typical site's."""
    carries: dict[str, int]
    """Fraction of an inner step left over from the round before, by site
    (`dilocox.coordinator.controller.pace`)."""

    def steps(self, site: str, count: int) -> int:
        """Return the inner steps that `site` takes in the first `count` steps of the typical site
        in this round."""
        return steps_taken(self.paces[site], self.carries[site], count)


@dataclass
class Chooser:
    """Makes one plan per round from the measurements of simulated sites.

    `menu` holds the payload sizes of all codecs that the controller may choose with
    `control.adapt = "link"`. The effective rank is unknown without gradients, so a run with
    `control.adapt = "effective-rank"` stays in its warm-up.
    """

    config: RunConfig
    menu: Menu
    sites: Sequence[str]
    plans: list[SimPlan] = field(default_factory=list)
    _before: Decided | None = None
    _left: dict[str, int] = field(default_factory=dict)
    """Fraction of an inner step that is left over from the last planned round, by site."""

    def choose(self, measured: Measurements, left: int) -> SimPlan:
        """Return the plan of the next round, of at most `left` inner steps.

        `measured`: all measurements of the sites so far. The controller uses only the rounds that
        a real coordinator would know when it makes this plan.
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
