"""The grid of the WAN benchmark: its model, links, methods and peers, and the length of each run.

A link is named by its ratio: the time in which the gradients of synchronous training cross it
(fp32, 2(D-1)/D of them per site, protocol headers included) over the time of an inner step. All
other times on the link follow from it in units of inner steps, so that runs have the right length
on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks import common
from dilocox.tools.testbed.shaping import FRAME_BYTES, SEGMENT_BYTES

Settings = dict[str, Any]

MODEL: Settings = common.MODEL
VOCABULARY = 1024
SEQUENCE_LENGTH = 64
SEQUENCES = 16
"""Per step, over all sites: few tokens for so many parameters, so that a step is short and a link
that is 400 times too slow for it is still one of a few Mbit/s."""
RATIO = 400
"""At this one `allreduce` must keep at most 0.3 %, and `dilocox` 97 %."""
RATIOS = (RATIO, RATIO // 10, RATIO * 10)
SITES = ("paris", "lyon", "nice", "lille")
NONE, ALONE = "none", "peers alone"
"""No exchange: the engine, and the loop of the peers."""
OURS, SYNCHRONOUS = "dilocox", "allreduce"
LIGHT = "dilocox-work-0.005"
"""As shipped but for `control.work`: half a per cent of the processor for exchanges, not 3."""

Kind = Literal["engine", "peer"]


@dataclass(frozen=True)
class Method:
    """A method of the engine, or a peer's script."""

    name: str
    kind: Kind
    inner_steps: int
    """H: steps in a cycle; of `dilocox`, whose controller chooses it, roughly."""
    bits: float = 32.0
    """Per value of a payload, roughly: how long a cycle on the link takes."""
    overlaps: bool = False
    """Its exchange goes on beside computation."""
    settings: Settings = field(default_factory=dict)
    """Keys of the run file, `section.key`; of a peer, of its job."""
    script: str = ""
    warm_up: int = 1
    """Cycles that are not measured."""
    dense_warm_up: int = 0
    """Steps of the warm-up that send everything."""

    @property
    def adapts(self) -> bool:
        """Its controller chooses how long its rounds are."""
        return self.settings.get("outer.method") == OURS

    def cycle_steps(self, ratio: float) -> float:
        """Time of a cycle on a link, in inner steps."""
        link = ratio * self.bits / 32
        return max(self.inner_steps, link) if self.overlaps else self.inner_steps + link

    def cycles(self, ratio: float, least: float) -> int:
        """Cycles that take as long as `least` inner steps, one at least."""
        return max(1, math.ceil(least / self.cycle_steps(ratio)))


METHODS = (
    Method(
        SYNCHRONOUS,
        "engine",
        1,
        settings={"outer.method": "allreduce", "outer.inner_steps": 1},
    ),
    # It exchanges at every step, ten times .17 bits in a round: that is the interval of accounting.
    Method(
        "cocktailsgd",
        "engine",
        10,
        1.7,
        overlaps=True,
        settings={"outer.method": "cocktailsgd"},
    ),
    Method("diloco", "engine", 500, settings={"outer.method": "diloco"}),
    Method("opendiloco", "engine", 500, 16, settings={"outer.method": "opendiloco"}),
    Method("intellect1", "engine", 100, 8.2, settings={"outer.method": "intellect1"}),
    Method("sparseloco", "engine", 30, 0.17, settings={"outer.method": "sparseloco"}, warm_up=2),
    Method(
        "dilocox-paper",
        "engine",
        125,
        3.5,
        overlaps=True,
        settings={"outer.method": "dilocox-paper", "compression.codec": "lowrank:32"},
        warm_up=2,
    ),
    Method(OURS, "engine", 20, 4.2, overlaps=True, settings={"outer.method": OURS}),
    Method(
        LIGHT,
        "engine",
        80,
        2.2,
        overlaps=True,
        settings={"outer.method": OURS, "control.work": 0.005},
    ),
    Method("ddp", "peer", 1, script="ddp"),
    Method(
        "ddp-powersgd",
        "peer",
        1,
        1.0,
        script="powersgd",
        settings={"rank": 1},
        warm_up=3,
        dense_warm_up=2,
    ),
    Method("torchft-diloco", "peer", 500, script="torchft_diloco"),
    Method(
        "torchft-streaming",
        "peer",
        100,
        script="torchft_streaming",
        overlaps=True,
        settings={"fragments": 4, "delay": 24, "keep": 0.5},
    ),
)
"""All peers with settings that do not slow them down: H as published, PowerSGD at its least rank,
Streaming DiLoCo at the longest delay that torchft takes. `benchmarks.quality` measures the loss of
methods."""
QUICK = (SYNCHRONOUS, OURS, "ddp", "ddp-powersgd", "torchft-streaming")
SLOWEST = (SYNCHRONOUS, "sparseloco", "dilocox-paper", OURS, LIGHT)
"""At links slower than `RATIO`: the others' one cycle takes as long as 3,000 steps and more."""
BY_NAME = {method.name: method for method in METHODS}

NO_EXCHANGE: Settings = {
    "outer.method": "diloco",
    "outer.inner_steps": 200,
    "outer.slots": 1,
    "outer.overlap": "none",
}
"""Each site in a run of its own: inner steps, and an outer step every 200 of them. A shorter round,
or the codecs of `dilocox` with nobody to send to, would make the reference slower."""
NO_EXCHANGE_ROUNDS = 4
PROBE_ROUNDS, PROBE_STEPS = 2, 50
"""What the time of a step is measured with before there is a link."""
ALONE_WARM_UP = 50
"""Steps of the peers' loop by itself that are not measured."""
START_SECONDS = 15.0
"""Starting and ending a measurement: processes, imports, evaluation."""
FLUSH_BITS = 8.2
"""Per value, of what a run's last outer step sends."""


@dataclass(frozen=True)
class Case:
    """One measurement."""

    sites: int
    ratio: int
    method: str
    """Of `METHODS`, `NONE` or `ALONE`."""
    block: int

    @property
    def key(self) -> dict[str, Any]:
        """What tells rows apart."""
        return {
            "sites": self.sites,
            "ratio": self.ratio,
            "method": self.method,
            "block": self.block,
        }


@dataclass(frozen=True)
class Extent:
    """How much is measured: blocks by method, and how long each, in inner steps."""

    core_blocks: int
    """Of no exchange and `dilocox` at two sites and the link of `RATIO`."""
    core_blocks_elsewhere: int
    other_blocks: int
    """How often the others are measured there, spread over these blocks."""
    other_blocks_elsewhere: int
    ours_steps: int
    """Inner steps of a run of `dilocox`; the first half is not measured."""
    least_steps: int
    """Others are measured for at least as long as so many inner steps take."""
    ratios: tuple[int, ...]
    sites: tuple[int, ...]
    methods: tuple[str, ...]


FULL = Extent(6, 3, 2, 1, 1200, 400, RATIOS, (2, 4), tuple(BY_NAME))
SHORT = Extent(2, 0, 1, 0, 500, 200, (RATIO,), (2,), QUICK)
SHORT_MINUTES = 9.5
"""`--quick`: what would last longer is left out, and said."""


def cases(extent: Extent) -> list[Case]:
    """All measurements in their order: block after block of each link, every second one backwards.

    Methods are spread over the blocks, so that each is measured some minutes from its reference;
    peers are in one block with the loop that is theirs. With more than two sites only the link of
    `RATIO` is measured, on slower ones `SLOWEST` alone.
    """
    found = []
    for sites in extent.sites:
        for ratio in extent.ratios if sites == 2 else (RATIO,):
            main = (sites, ratio) == (2, RATIO)
            core = extent.core_blocks if main else extent.core_blocks_elsewhere
            often = extent.other_blocks if main else extent.other_blocks_elsewhere
            methods = [m for m in extent.methods if ratio <= RATIO or m in SLOWEST]
            for block, inside in enumerate(_blocks(methods, core, often)):
                inside = inside if block % 2 == 0 else inside[::-1]
                found += [Case(sites, ratio, name, block) for name in inside]
    return found


def _blocks(methods: Sequence[str], core: int, often: int) -> list[list[str]]:
    """What each block of a link is made of: the reference and what adapts in each of `core`, the
    other methods `often` times, each time over as many blocks as there are for it."""
    ours = [name for name in methods if BY_NAME[name].adapts]
    found = [[NONE, *ours] if block < core else [] for block in range(max(core, often))]
    if often:
        each = max(1, core // often)
        for block in range(each * often):
            found[block] += _group(methods, block % each, each)
    return found


def _group(methods: Sequence[str], number: int, groups: int) -> list[str]:
    """The others of one block out of `groups`: peers in the last one."""
    engine = [m for m in methods if BY_NAME[m].kind == "engine" and not BY_NAME[m].adapts]
    peers = [m for m in methods if BY_NAME[m].kind == "peer"]
    share = max(1, groups - 1 if peers else groups)
    size = math.ceil(len(engine) / share)
    found = engine[number * size : (number + 1) * size]
    return [*found, *peers, ALONE] if peers and number == groups - 1 else found


def duration(case: Case, extent: Extent, step_seconds: float) -> float:
    """Seconds that a measurement takes, roughly: its warm-up, its flush and its start included."""
    if case.method == NONE:
        steps: float = NO_EXCHANGE_ROUNDS * int(NO_EXCHANGE["outer.inner_steps"])
    elif case.method == ALONE:
        steps = ALONE_WARM_UP + extent.least_steps
    else:
        method, ratio = BY_NAME[case.method], case.ratio
        cycles = method.warm_up + method.cycles(ratio, extent.least_steps)
        steps = cycles * method.cycle_steps(ratio) + method.dense_warm_up * ratio
        if method.adapts:
            steps = extent.ours_steps
        if method.kind == "engine" and method.inner_steps > 1:
            steps += ratio * FLUSH_BITS / 32
    return START_SECONDS + steps * step_seconds


def synchronous_bits(parameters: int, sites: int) -> float:
    """What a site's link carries, headers included, when fp32 gradients of so many parameters are
    averaged over `sites` with the least traffic: 2(D-1)/D of them."""
    payload = 4 * parameters * 2 * (sites - 1) / sites
    return payload * 8 * FRAME_BYTES / SEGMENT_BYTES


def link_of(ratio: float, parameters: int, sites: int, step_seconds: float) -> float:
    """Bits per second, two digits, of the link with that ratio, or a slightly greater one.

    Rounded down, so that the ratio is reached.
    """
    rate = synchronous_bits(parameters, sites) / (ratio * step_seconds)
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.floor(rate / unit) * unit


def batch(sites: int) -> int:
    """Sequences per step and site."""
    return SEQUENCES // sites
