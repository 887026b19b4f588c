"""Inputs and results of a simulated run: its sites, their rounds, and the plans."""

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
    """Seconds of an inner step without any wait."""
    tokens: int
    """Tokens per inner step."""
    rate: float
    """Payload bytes per second of the site's link, in the narrower direction."""
    rtt: float
    """Round trip to the other sites, in seconds."""
    host: Host
    cores: float | None = None
    """Processor cores that training and exchanges share. None: training runs on GPUs."""
    shards: int = 1
    replicas: int = 1
    """Replicas of the site's stages and shards. All replicas compute; only the first one
    exchanges."""


@dataclass
class Round:
    """Timing of one round of one site. `start` and `end` are seconds from the start of the run."""

    start: float
    end: float = 0.0
    waited: float = 0.0
    """Seconds in which training waited for exchanges."""
    received: int = 0
    """Payload bytes received; as many are sent."""
    link: list[Interval] = field(default_factory=list)
    """Transfers: (start, end, bytes)."""
    overhead: float = 0.0
    """Seconds of all exchanges outside of their transfers, from encoding to decoding."""
    exchanges: int = 0
    work: float = 0.0
    """Seconds that training loses to exchanges, waits not included, at the rank that loses most.
    On processors: all computation of the exchanges. On GPUs: boundaries and landings."""
    steps: int = 0
    """Inner steps of the site."""


@dataclass
class SimulatedRun:
    """A simulated run: its plans, and its rounds by site."""

    sites: Sequence[SimSite]
    choices: list[Choice]
    """Plan of each round."""
    rounds: list[list[Round]]
    """By site."""
    samples: dict[int, dict[str, Sample]]
    """By round and site."""

    @property
    def whole(self) -> int:
        """Number of rounds of full length.

        A last round that was cut to the remaining steps does not count, unless it is the only one:
        such a round is not typical.
        """
        count = len(self.choices)
        return count - (count > 1 and self.choices[-1].cut)

    def settled(self) -> int:
        """Return the index of the first settled round.

        From the round before it on, the plan stays the same. Payloads of the previous plan still
        land in the first round of a new plan, so the settled rounds begin one round later.
        """
        plans = [(c.inner_steps, c.slots, c.delay, c.codec) for c in self.choices[: self.whole]]
        first = len(plans) - 1
        while first > 0 and plans[first - 1] == plans[-1]:
            first -= 1
        # Payloads of the previous plan still land in the first round of the last one.
        return min(first + 1, len(plans) - 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all sites together, over the settled rounds."""
        first, last = self.settled(), self.whole - 1
        begin = max(rounds[first].start for rounds in self.rounds)
        end = max(rounds[last].end for rounds in self.rounds)
        return self.settled_tokens / (end - begin)

    @property
    def settled_tokens(self) -> int:
        """Tokens of all sites in the settled rounds."""
        return sum(site.tokens * self.steps_of(number) for number, site in enumerate(self.sites))

    @property
    def tokens(self) -> int:
        """Tokens of all sites in all rounds, settled or not."""
        return sum(
            site.tokens * each.steps
            for site, rounds in zip(self.sites, self.rounds, strict=True)
            for each in rounds
        )

    @property
    def seconds(self) -> float:
        """Seconds from the start of the run to the end of the last round."""
        return max(rounds[-1].end for rounds in self.rounds)

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that all sites sent in all rounds."""
        return sum(each.received for rounds in self.rounds for each in rounds)

    def _settled_rounds(self, site: int) -> list[Round]:
        return self.rounds[site][self.settled() : self.whole]

    def steps_of(self, site: int) -> int:
        """Return the inner steps of site number `site` in the settled rounds."""
        return sum(each.steps for each in self._settled_rounds(site))

    @property
    def tokens_per_step(self) -> float:
        """Tokens of all sites together per inner step of the typical site, in settled rounds."""
        counted = sum(each.inner_steps for each in self.choices[self.settled() : self.whole])
        return self.settled_tokens / counted

    def step_seconds_of(self, site: int) -> float:
        """Return the mean seconds from one inner step of a site to its next, all waits included."""
        rounds = self._settled_rounds(site)
        return (rounds[-1].end - rounds[0].start) / self.steps_of(site)

    @property
    def busy(self) -> list[float]:
        """Seconds of computation of each site in the settled rounds."""
        return [site.step * self.steps_of(number) for number, site in enumerate(self.sites)]

    @property
    def slowest(self) -> int:
        """Number of the site that the others wait for: the one that computes longest.

        Among sites within 5 % of the longest, it is the one with the longest inner step.
        """
        busy = self.busy
        near = [number for number, own in enumerate(busy) if own >= 0.95 * max(busy)]
        return max(near, key=lambda number: self.sites[number].step)

    @property
    def waited_share(self) -> float:
        """Share of the settled time in which the average site stood still for the network."""
        return sum(map(self.waited_share_of, range(len(self.sites)))) / len(self.sites)

    def waited_share_of(self, site: int) -> float:
        """Return the share of the settled time in which site number `site` stood still for the
        network."""
        rounds = self._settled_rounds(site)
        return sum(each.waited for each in rounds) / (rounds[-1].end - rounds[0].start)
