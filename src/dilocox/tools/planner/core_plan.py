"""Speed and memory of a run: the part of a plan that advice is checked by.

A change of the run file may change what the controller chooses for the rounds, and so the memory
of exchanges. So advice only promises what `Cluster.plan` returns for the changed run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.choice import Choice
from dilocox.tools.planner.hardware_table import GpuPlacement, Link
from dilocox.tools.planner.host_memory import HostMemory, host_memory
from dilocox.tools.planner.memory_footprint import Footprint, counted, footprints, needed
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.predict import Prediction, predict
from dilocox.tools.planner.step_time import StepTime, step_time
from dilocox.tools.planner.variants import at_site, changed, on_device

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CorePlan:
    """Predicted speed and memory need of a run at the sites of a cluster."""

    config: RunConfig
    """The run, as long as the tokens of the plan take."""
    outline: ModelOutline
    prediction: Prediction
    fullest: GpuPlacement
    """The placement whose devices have the highest share of their memory in use. `footprints` and
    `needed` describe this placement."""
    footprints: list[Footprint]
    """By stage."""
    needed: int
    """Bytes that the fullest device needs."""
    host: HostMemory | None
    """Host memory of the fullest machine. None if no site has GPUs."""
    step: StepTime
    """Inner step of the site that the others wait for."""

    @property
    def available(self) -> int:
        """Bytes that training may use of the fullest device."""
        return self.fullest.device.memory

    @property
    def fits_devices(self) -> bool:
        """Whether every rank fits its device."""
        return self.needed <= self.available

    @property
    def fits_hosts(self) -> bool:
        """Whether the ranks of every machine fit its host memory, where that is known."""
        return self.host is None or self.host.fits

    def keeps(self, other: CorePlan) -> bool:
        """Whether `other` fits all devices, and all hosts unless this plan does not fit them."""
        return other.fits_devices and (other.fits_hosts or not self.fits_hosts)


@dataclass(frozen=True)
class FilledDevice:
    """Memory need of a run at one placement."""

    place: GpuPlacement
    footprints: list[Footprint]
    """By stage."""
    needed: int
    """Bytes that the placement's fullest device needs."""

    @property
    def share(self) -> float:
        """Share of the device's memory in use; above 1 if the run does not fit."""
        return self.needed / max(1, self.place.device.memory)


Planned = Callable[[Mapping[str, Any], ModelOutline | None], CorePlan]
"""Plans the run with changed keys. The second argument is an outline with the model's new cut, or
None. Raises `DilocoxError` if the run file does not allow the change."""


@dataclass(frozen=True)
class Cluster:
    """Where a run is planned, and how many tokens it takes."""

    places: Sequence[GpuPlacement]
    """GPUs of each site."""
    links: Sequence[Link]
    """Link of each site."""
    fabric: float
    """Bytes per second of a node's network inside its site."""
    tokens: float | None = None
    """Length of the run in tokens. None: the steps of the run file."""

    def plan(
        self,
        config: RunConfig,
        outline: ModelOutline | None = None,
        progress: Progress = lambda _: None,
    ) -> CorePlan:
        """Plan the run of `config`, which has one site per placement.

        `outline`: of the same model and layout, if it is there already. `progress`: called with
        the name of each stage of the work. Raises the errors of `plan_run`.
        """
        if self.tokens is not None:
            batches = sum(config.site_batch(name) for name in config.sites)
            config = as_long_as(config, self.tokens, batches * config.data.sequence_length)
        progress("the model's shape")
        outline = ModelOutline.of(config) if outline is None else outline
        largest = at_site(config, max(config.sites, key=config.site_batch))
        progress("the run's own plan")
        prediction = self.predict(config, outline)
        guessed = config.total_steps
        if self.tokens is not None:
            # Sites may take fewer or more steps than the typical one, whose steps the run file
            # counts.
            config = as_long_as(config, self.tokens, prediction.course.tokens_per_step)
        if config.total_steps != guessed:
            prediction = self.predict(config, outline)
        progress("memory")
        filled = filled_devices(largest, outline, self.places, prediction.choice)
        fullest = max(filled, key=lambda each: each.share)
        slowest = prediction.course.slowest
        site = at_site(config, list(config.sites)[slowest])
        return CorePlan(
            config=config,
            outline=outline,
            prediction=prediction,
            fullest=fullest.place,
            footprints=fullest.footprints,
            needed=fullest.needed,
            host=host_memory([(each.place, each.footprints) for each in filled], largest),
            step=step_time(site, outline, self.places[slowest], self.fabric),
        )

    def predict(self, config: RunConfig, outline: ModelOutline) -> Prediction:
        """Predict the speed of the run of `config`, which has one site per placement."""
        return predict(
            config, self.places, self.links, list(config.sites), fabric=self.fabric, outline=outline
        )

    def planned(self, config: RunConfig, known: ModelOutline) -> Planned:
        """Return a function that plans the run of `config` with changed keys.

        `known`: outline of the run, for changes that do not move the cut between stages.
        """

        def plan(values: Mapping[str, Any], outline: ModelOutline | None) -> CorePlan:
            return self.plan(changed(config, values), known if outline is None else outline)

        return plan


def as_long_as(config: RunConfig, tokens: float, per_step: float) -> RunConfig:
    """Return the run with the length that `tokens` take. `per_step`: tokens of all sites per inner
    step of the typical site."""
    steps = max(1, round(tokens / per_step))
    return changed(config, {"outer.rounds": None, "outer.steps": steps})


def filled_devices(
    config: RunConfig, outline: ModelOutline, places: Sequence[GpuPlacement], rounds: Choice
) -> list[FilledDevice]:
    """Return the memory need of the run at each of `places`; equal placements come once."""
    found: list[FilledDevice] = []
    for place in places:
        if any(place == known.place for known in found):
            continue
        there = on_device(config, place.device)
        stages = footprints(there, outline, place, counted(there, outline), rounds)
        found.append(FilledDevice(place, stages, needed(stages, place, there)))
    return found
