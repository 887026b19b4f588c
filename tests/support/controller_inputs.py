"""A run in numbers only: payload sizes without a model, and a link that is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.controller.candidates import candidate, codecs
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.exchange_timing import Crowd, together
from dilocox.coordinator.controller.link_estimator import Estimate, Sample, estimated
from dilocox.coordinator.controller.link_policy import Now, choose

BITS = {"none": 32.0, "fp16": 16.0, "int8": 8.125, "int4": 4.125, "int2": 2.125, "lowrank:16": 1.0}


def run_config(steps: int = 600, sites: str = "ab", **sections: dict[str, Any]) -> RunConfig:
    raw: dict[str, Any] = {
        "model": {"path": "x", "pretrained": False},
        "sites": {name: {} for name in sites},
        **sections,
    }
    raw["outer"] = {"steps": steps, **sections.get("outer", {})}
    return resolve_run(raw)


def menu(config: RunConfig, values: int = 1_000_000) -> dict[str, list[list[int]]]:
    """Sizes of a model of so many values, the last fragment the largest."""
    stages, fragments = config.site.stages, config.outer.fragments
    shares = [1 + (fragment == fragments - 1) for fragment in range(fragments)]
    sizes = {}
    for codec in codecs(config):
        spec = parse_spec(codec)
        each = {"topk": 14, "top1": 12}.get(spec.kind)
        bits = BITS[codec] if each is None else each * spec.density / 4096
        whole = values * bits / 8 / stages / sum(shares)
        sizes[codec] = [[64 + round(whole * share) for share in shares] for _ in range(stages)]
    return sizes


def at(rate: float, step_us: int = 100_000) -> Estimate:
    """A link of so many bytes per second, without latency."""
    return Estimate(step_us, round(rate), 0, 0)


@dataclass
class Play:
    """Rounds one after the other: the plan of round t is made from what was measured in t - 2."""

    config: RunConfig
    rate: Callable[[int], float]
    """True bytes per second of round t, noise included."""
    step_us: Callable[[int], float] = lambda _: 100_000.0
    latency_us: float = 0.0
    sites: int = 2
    beside_us: Callable[[int], float] = lambda _: 0.0
    """What an exchange of round t takes beside its transfers."""
    work_us: Callable[[str], float] = lambda _: 0.0
    """What training loses by the exchanges of a round with a codec."""
    constant_us: Callable[[int], float] = lambda _: 0.0
    """What a swap of round t takes beside its bytes, and is measured as part of it."""
    choices: list[Choice] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    estimate: Estimate | None = None

    def __post_init__(self) -> None:
        self.menu = menu(self.config)

    def round(self) -> Choice:
        number = len(self.choices)
        measured = self.samples[number - 2 : number - 1] if number >= 2 else []
        earlier = self.samples[number - 3 : number - 2] if number >= 3 else []
        self.estimate = estimated(self.estimate, measured, self.config.control, earlier)
        now = in_force(self.choices[-1]) if self.choices else None
        choice = choose(self.config, self.menu, self.estimate, self.sites, now)
        self.choices.append(choice)
        self.samples.append(self.sample(number, choice))
        return choice

    def sample(self, number: int, choice: Choice) -> Sample:
        """What a round of that plan measures: latency passes once for each swap."""
        count = total = 0
        busy = 0.0
        sizes = together(self.menu[choice.codec], choice.fragments, self.config.site.shards)
        for payload in (size for row in sizes for size in row):
            swaps, each = Crowd(self.sites, self.config.outer.exchange).swaps(payload)
            count, total = count + swaps, total + swaps * each
            constant = self.latency_us + self.constant_us(number)
            busy += swaps * (constant + each / self.rate(number) * 1e6)
        beside = round(self.beside_us(number))
        return Sample(
            round(self.step_us(number)), total, round(busy), count, beside,
            round(self.work_us(choice.codec)), choice.codec, choice.fragments,
        )  # fmt: skip

    def run(self, rounds: int) -> list[Choice]:
        for _ in range(rounds):
            self.round()
        return self.choices

    def fits(self, choice: Choice, rate: float) -> bool:
        """The plan hides on the true link, with no time to spare."""
        sizes = self.menu[choice.codec]
        link = Estimate(100_000, round(rate), round(self.latency_us), 0)
        steps = choice.inner_steps
        return candidate(
            self.config, sizes, choice.codec, steps, link, self.sites, choice.fragments, True
        ).fits


def chosen(choice: Choice) -> tuple[int, str, int, int]:
    return choice.inner_steps, choice.codec, choice.fragments, choice.delay


def in_force(choice: Choice) -> Now:
    return choice.inner_steps, choice.codec, choice.fragments
