"""Predicts a run's speed in tokens per second from its run file, devices and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dilocox.config.run_config import RunConfig, with_sites
from dilocox.coordinator.controller.candidates import codecs
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.exchange_timing import Crowd, together
from dilocox.coordinator.protocol.round_plan import AT_ONCE
from dilocox.errors import ConfigError
from dilocox.tools.planner.hardware_table import Device, GpuPlacement, Link
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.outer_path import outer_path
from dilocox.tools.planner.payload_costs import parcels
from dilocox.tools.planner.simulated_run import SimSite, SimulatedRun
from dilocox.tools.planner.simulator import Menu, simulate
from dilocox.tools.planner.step_time import replica_rate, step_time
from dilocox.tools.planner.variants import at_site

T = TypeVar("T")
ROUNDS = 12
"""Simulated rounds: enough for the controller's plan to settle, and some rounds after that."""


@dataclass(frozen=True)
class Prediction:
    """A run's speed once its plan has settled. Rates are sums over all sites."""

    tokens_per_second: float
    alone: float
    """Tokens per second of the same sites without exchanges. With `control.steps = "by-speed"`
    each site runs at its own speed; otherwise all sites run at the pace of the slowest."""
    waited_share: float
    """Share of the time in which training stands still for the network, averaged over sites."""
    choice: Choice
    """The settled plan. For a method that exchanges gradients, its inner steps are only a unit of
    accounting."""
    round_seconds: float
    exchange_seconds: float
    """Seconds per round in which the link is busy."""
    payload_bytes: int
    """Payload bytes that a site sends in a round; it receives as many."""
    work_seconds: float
    """Seconds per round that training loses to exchanges, waits not included (`Round.work`)."""
    step_seconds: float
    """Seconds of an inner step at the slowest site."""
    tokens_per_step: int
    """Tokens of one inner step, summed over all sites."""
    course: SimulatedRun
    """The simulated run that the prediction was read from."""

    @property
    def share(self) -> float:
        """Predicted speed as a share of the speed without exchanges."""
        return self.tokens_per_second / self.alone

    @property
    def payload_per_token(self) -> float:
        """Payload bytes that all sites together send per trained token."""
        rounds = self.course.whole - self.course.settled()
        sent = len(self.course.sites) * self.payload_bytes * rounds
        return sent / self.course.settled_tokens


@dataclass(frozen=True)
class Simulation:
    """How the rounds behind a prediction are simulated."""

    rounds: int = ROUNDS
    pair_rate: float | None = None
    """Bytes per second of the narrowest path between two sites, if that is narrower than their
    links."""
    at_once: int = AT_ONCE
    """Exchange threads of a rank."""


def predict(
    config: RunConfig,
    device: Device | GpuPlacement | Sequence[Device | GpuPlacement],
    link: Link | Sequence[Link],
    sites: int | Sequence[str],
    *,
    step_seconds: float | Sequence[float] | None = None,
    fabric: float = 12.5e9,
    simulation: Simulation | None = None,
    outline: ModelOutline | None = None,
) -> Prediction:
    """Predict the speed of a run.

    `device`, `link` and `step_seconds` are either one value for all sites or one value per site.

    Args:
        config: The run.
        device: A site's `GpuPlacement`, or the `Device` of each of its ranks.
        link: Link of a site to the others.
        sites: Number of sites, or their names.
        step_seconds: Measured seconds of an inner step. None: the cost model's figure.
        fabric: Bytes per second of a node's network inside its site.
        simulation: How the rounds are simulated. None: the defaults of `Simulation`.
        outline: Outline of the same model and layout. None: it is built here.

    Raises:
        ConfigError: The run is not possible, or a list has the wrong length.
        ModelError: The model cannot be built or cut into stages.
    """
    given = simulation or Simulation()
    config = with_sites(config, sites)
    outline = ModelOutline.of(config) if outline is None else outline
    count = len(config.sites)
    devices: list[Device | GpuPlacement] = _each(device, count, "devices")
    places = [
        each if isinstance(each, GpuPlacement) else GpuPlacement(each, config.site.ranks, 1)
        for each in devices
    ]
    links = _each(link, count, "links")
    if step_seconds is None:
        steps = [
            step_time(at_site(config, name), outline, place, fabric).seconds
            for name, place in zip(config.sites, places, strict=True)
        ]
    else:
        steps = [float(each) for each in _each(step_seconds, count, "step times")]
    sim_sites = [
        SimSite(
            name=name,
            step=step,
            tokens=config.site_batch(name) * config.data.sequence_length,
            rate=own.rate,
            rtt=own.rtt,
            host=outer_path(config, place.device, replica_rate(config, place, fabric)),
            cores=place.device.cores if place.device.shared else None,
            shards=config.site.shards,
            replicas=config.site.replicas,
        )
        for name, step, own, place in zip(config.sites, steps, links, places, strict=True)
    ]
    menu = menu_of(config, outline)
    course = simulate(config, sim_sites, menu, given.rounds, given.pair_rate, given.at_once)
    return _settled(config, menu, course)


def menu_of(config: RunConfig, outline: ModelOutline) -> Menu:
    """Return the payload costs of every codec that the run may use, by codec, stage and piece."""
    names = [config.compression.codec]
    if config.control.adapt == "link":
        # The run file's own codec need not be one of the controller's candidates.
        names += ["none", *codecs(config)]
    return {
        name: parcels(config, outline.shapes, config.sent_as(name)) for name in dict.fromkeys(names)
    }


def _settled(config: RunConfig, menu: Menu, course: SimulatedRun) -> Prediction:
    sites = course.sites
    first, end = course.settled(), course.whole
    last = [each[end - 1] for each in course.rounds]
    total = sum(site.tokens for site in sites)
    if config.control.steps == "by-speed":
        alone = sum(site.tokens / site.step for site in sites)
    else:
        # All sites wait for the slowest one, whatever the network does.
        alone = total / max(site.step for site in sites)
    settled = [record for each in course.rounds for record in each[first:end]]
    choice = course.choices[end - 1]
    crowd = Crowd(len(sites), config.outer.exchange)
    often = choice.inner_steps if config.exchanges_gradients else 1
    sent = 0
    for row in menu[choice.codec]:
        count = len(row) if config.exchanges_gradients else choice.fragments
        for payload in together([[each.payload for each in row]], count, config.site.shards)[0]:
            number, size = crowd.swaps(payload)
            sent += often * number * size
    measured = course.samples.get(end - 1, {})
    busy = [sample.exchange_us for sample in measured.values()]
    return Prediction(
        tokens_per_second=course.tokens_per_second,
        alone=alone,
        waited_share=course.waited_share,
        choice=choice,
        round_seconds=max(record.end - record.start for record in last),
        exchange_seconds=max(busy, default=0) / 1e6,
        payload_bytes=sent,
        work_seconds=max(record.work for record in settled),
        step_seconds=max(site.step for site in sites),
        tokens_per_step=total,
        course=course,
    )


def _each(given: T | Sequence[T], count: int, what: str) -> list[T]:
    """Return `given` as a list of one value per site. `what` names the values in the error."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ConfigError(f"{count} sites need one or {count} {what}, not {len(given)}")
    return list(given)
