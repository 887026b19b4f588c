"""How fast a run would go: from a run file, devices and links to tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dilocox.config.run_config import RunConfig, with_sites
from dilocox.coordinator.controller.candidates import codecs
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.exchange_timing import Crowd, together
from dilocox.coordinator.protocol.schedule import AT_ONCE
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
"""Simulated: enough for the controller to settle, and for some rounds after that."""


@dataclass(frozen=True)
class Prediction:
    """A run's speed once its plans have settled. Rates are those of all sites together."""

    tokens_per_second: float
    alone: float
    """Tokens per second of the same sites with the exchange switched off: of each for itself where
    sites take steps by their speed, else all at the pace of the slowest."""
    waited_share: float
    """Of the time, at the average site, in which training stands still for the network."""
    choice: Choice
    """The settled plan; for a method that exchanges gradients its inner steps are accounting."""
    round_seconds: float
    exchange_seconds: float
    """Of a round in which the link is busy."""
    payload_bytes: int
    """That a site sends, and receives, in a round."""
    work_seconds: float
    """That training loses by a round's exchanges beside waiting (`Round.work`)."""
    step_seconds: float
    """Of an inner step at the slowest site."""
    tokens_per_step: int
    """Of all sites."""
    course: SimulatedRun

    @property
    def share(self) -> float:
        """Of the speed without exchange."""
        return self.tokens_per_second / self.alone

    @property
    def payload_per_token(self) -> float:
        """Bytes that all sites together send for a token trained."""
        rounds = self.course.whole - self.course.settled()
        sent = len(self.course.sites) * self.payload_bytes * rounds
        return sent / self.course.settled_tokens


def predict(
    config: RunConfig,
    device: Device | GpuPlacement | Sequence[Device | GpuPlacement],
    link: Link | Sequence[Link],
    sites: int | Sequence[str],
    *,
    step_seconds: float | Sequence[float] | None = None,
    fabric: float = 12.5e9,
    pair_rate: float | None = None,
    rounds: int = ROUNDS,
    at_once: int = AT_ONCE,
    outline: ModelOutline | None = None,
) -> Prediction:
    """Predict the speed of `config` among `sites` sites: their number, or their names.

    `device` (a whole `GpuPlacement`, or a single one per rank), `link` and `step_seconds` are one
    for all sites or one for each. `step_seconds`, if known, replaces the cost model's step.
    `fabric` and `pair_rate` are bytes per second: of a node's network inside its site, and of the
    narrowest path between two sites if that is narrower than their links. `at_once`: exchange
    threads of a rank. `outline`: of the same model and layout, if it is there already. Raises
    `ConfigError` and `ModelError`.
    """
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
    return _settled(config, menu, simulate(config, sim_sites, menu, rounds, pair_rate, at_once))


def menu_of(config: RunConfig, outline: ModelOutline) -> Menu:
    """Parcels of every codec that the run may use."""
    names = [config.compression.codec]
    if config.control.adapt == "link":
        # What a run begins with may be none that the controller would choose.
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
        # Everybody waits for the slowest, with or without a network between them.
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
    """One for each of `count` sites."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ConfigError(f"{count} sites need one or {count} {what}, not {len(given)}")
    return list(given)
