"""Who makes the rounds' plans in a simulated run: the same controller as in a real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dilocox.config import RunConfig
from dilocox.outer.controller import by_link, by_rank
from dilocox.outer.controller.candidates import Menu
from dilocox.outer.controller.choice import Choice, as_the_run_file_says
from dilocox.outer.controller.link import Estimate, Sample, declared, estimated

LOOK_BACK = 2
"""The plan of round t may use what was measured up to round t - 2, as at the coordinator."""


@dataclass
class Chooser:
    """Makes a plan per round from what simulated sites measure.

    `menu` holds the payload sizes of all codecs that the controller may choose, if it goes by the
    link. The effective rank cannot be known without gradients: `effective-rank` stays in warm-up.
    """

    config: RunConfig
    menu: Menu
    sites: int
    choices: list[Choice] = field(default_factory=list)
    estimates: list[Estimate | None] = field(default_factory=list)

    def choose(self, measured: Mapping[int, list[Sample]]) -> Choice:
        """The plan of the next round; `measured` by round, of all sites that are through."""
        config = self.config
        round_ = len(self.choices)
        estimate = self.estimates[-1] if self.estimates else None
        if config.control.adapt == "off":
            choice = as_the_run_file_says(config)
        elif config.control.adapt == "effective-rank":
            choice = by_rank.choose(config, [])
        else:
            estimate = declared(config.control) or estimated(
                estimate, measured.get(round_ - LOOK_BACK, []), config.control
            )
            last = self.choices[-1] if self.choices else None
            now = None if last is None else (last.inner_steps, last.codec)
            choice = by_link.choose(config, self.menu, estimate, self.sites, now)
        self.choices.append(choice)
        self.estimates.append(estimate)
        return choice
