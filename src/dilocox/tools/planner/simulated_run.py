"""What a simulated run is made of, and what it came to: sites, their rounds, the plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.link_estimator import Sample
from dilocox.tools.planner.hardware_table import Host
from dilocox.training.round_meter import Interval


@dataclass(frozen=True)
class SimSite:
    """One site of a simulated run."""

    name: str
    step: float
    """Seconds of an inner step with nothing to wait for."""
    tokens: int
    """Per inner step."""
    rate: float
    """Payload bytes per second of its link, in the narrower direction."""
    rtt: float
    host: Host
    cores: float | None = None
    """Processor cores that computing and exchanging share; none: they do not share any."""
    shards: int = 1
    replicas: int = 1
    """Of stages and shards. The first one alone exchanges; all of them compute."""


@dataclass
class Round:
    """What one round of one site was like. Seconds from the start of the run."""

    start: float
    end: float = 0.0
    waited: float = 0.0
    received: int = 0
    """Payload bytes; as many are sent."""
    link: list[Interval] = field(default_factory=list)
    """Transfers: (start, end, bytes)."""
    overhead: float = 0.0
    exchanges: int = 0
    work: float = 0.0
    """Seconds that training loses by its exchanges beside waiting, at the rank that loses most: on
    processors the time that all they compute takes there, on GPUs boundaries and landings."""
    steps: int = 0


@dataclass
class SimulatedRun:
    """A simulated run: its plans, and its rounds by site."""

    sites: Sequence[SimSite]
    choices: list[Choice]
    rounds: list[list[Round]]
    """By site."""
    samples: dict[int, dict[str, Sample]]
    """By round and site."""

    @property
    def whole(self) -> int:
        """Rounds without a last one that was cut to the steps that were left, if there are others:
        such a round says nothing about any other."""
        count = len(self.choices)
        return count - (count > 1 and self.choices[-1].cut)

    def settled(self) -> int:
        """The first round from which on the plan stays the same, one for it to take effect."""
        plans = [(c.inner_steps, c.slots, c.delay, c.codec) for c in self.choices[: self.whole]]
        first = len(plans) - 1
        while first > 0 and plans[first - 1] == plans[-1]:
            first -= 1
        # What was sent under the plan before still lands in its first round.
        return min(first + 1, len(plans) - 1)

    @property
    def tokens_per_second(self) -> float:
        """Of all sites together, over the settled rounds."""
        first, last = self.settled(), self.whole - 1
        begin = max(rounds[first].start for rounds in self.rounds)
        end = max(rounds[last].end for rounds in self.rounds)
        return self.settled_tokens / (end - begin)

    @property
    def settled_tokens(self) -> int:
        """Of all sites, in the settled rounds."""
        return sum(site.tokens * self.steps_of(number) for number, site in enumerate(self.sites))

    @property
    def tokens(self) -> int:
        """Of all sites and rounds, settled or not."""
        return sum(
            site.tokens * each.steps
            for site, rounds in zip(self.sites, self.rounds, strict=True)
            for each in rounds
        )

    @property
    def seconds(self) -> float:
        """From the start of the run to the end of the last round."""
        return max(rounds[-1].end for rounds in self.rounds)

    @property
    def sent_bytes(self) -> int:
        """Payloads of all sites and rounds."""
        return sum(each.received for rounds in self.rounds for each in rounds)

    def _settled_rounds(self, site: int) -> list[Round]:
        return self.rounds[site][self.settled() : self.whole]

    def steps_of(self, site: int) -> int:
        """Inner steps of a site, by its number, in the settled rounds."""
        return sum(each.steps for each in self._settled_rounds(site))

    @property
    def tokens_per_step(self) -> float:
        """Of all sites together, while the typical one takes one step, in the settled rounds."""
        counted = sum(each.inner_steps for each in self.choices[self.settled() : self.whole])
        return self.settled_tokens / counted

    def step_seconds_of(self, site: int) -> float:
        """Time from one inner step of a site to its next, whatever it does between them."""
        rounds = self._settled_rounds(site)
        return (rounds[-1].end - rounds[0].start) / self.steps_of(site)

    @property
    def busy(self) -> list[float]:
        """Seconds that each site computes in the settled rounds."""
        return [site.step * self.steps_of(number) for number, site in enumerate(self.sites)]

    @property
    def slowest(self) -> int:
        """Number of the site that computes most of the time, which the others wait for; among those
        that do about as much, of the one whose steps take longest."""
        busy = self.busy
        near = [number for number, own in enumerate(busy) if own >= 0.95 * max(busy)]
        return max(near, key=lambda number: self.sites[number].step)

    @property
    def waited_share(self) -> float:
        """Share of the settled time in which the average site stood still for the network."""
        return sum(map(self.waited_share_of, range(len(self.sites)))) / len(self.sites)

    def waited_share_of(self, site: int) -> float:
        """The same of one site, by its number."""
        rounds = self._settled_rounds(site)
        return sum(each.waited for each in rounds) / (rounds[-1].end - rounds[0].start)
