"""Who makes the rounds' plans in a simulated run: the same controller as in a real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dilocox.config import RunConfig
from dilocox.outer.controller import deciding
from dilocox.outer.controller.candidates import Menu
from dilocox.outer.controller.choice import Choice
from dilocox.outer.controller.deciding import Decided, Measurements
from dilocox.outer.controller.link import Estimate
from dilocox.outer.controller.pace import carried, steps_taken


@dataclass(frozen=True)
class SimPlan:
    """What is decided for a round."""

    choice: Choice
    """Cut to the steps that are left."""
    paces: dict[str, int]
    carries: dict[str, int]
    """By site; see `dilocox.outer.controller.pace`."""
    estimate: Estimate | None

    def steps(self, site: str, count: int) -> int:
        """Inner steps of `site` while the fastest takes `count` from the round's beginning."""
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
    _decided: Decided | None = None

    def choose(self, measured: Measurements, left: int) -> SimPlan:
        """The plan of the next round, of `left` inner steps at most.

        `measured`: all that the sites have measured so far; the controller looks no further than
        it may.
        """
        config, round_ = self.config, len(self.plans)
        paces = deciding.paces_of(config, round_, self.sites, measured, self._decided)
        choice, estimate = deciding.chosen(
            config, self.menu, round_, paces, measured, [], self._decided
        )
        choice = choice.shortened(left, config.outer.overlap)
        carries = {site: self._carry(site, paces[site], choice.inner_steps) for site in paces}
        self.plans.append(SimPlan(choice, paces, carries, estimate))
        self._decided = Decided(choice.inner_steps, choice.codec, paces, estimate)
        return self.plans[-1]

    def _carry(self, site: str, pace: int, inner_steps: int) -> int:
        """What the round before has left of a step."""
        left = 0
        if self.plans:
            last = self.plans[-1]
            left = carried(last.paces[site], last.carries[site], last.choice.inner_steps)[1]
        return carried(pace, left, inner_steps)[0]
