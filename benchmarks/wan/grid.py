"""The grid of the WAN benchmark: its model, links, methods and peers, and the length of each run.

A link is named by its ratio: the time in which the gradients of synchronous training cross it, over
the time of an inner step. Gradients are fp32, 2(D-1)/D of them per site, with protocol headers. All
other times on the link follow from the ratio in units of inner steps, so runs have the right length
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
"""Sequences per step, of all sites together. Few tokens for many parameters make a step short, so
that a link that is 400 times too slow still has some Mbit/s."""
RATIO = 400
"""Link at which `allreduce` must keep at most 0.3 %, and `dilocox` 97 %."""
RATIOS = (RATIO, RATIO // 10, RATIO * 10)
SITES = ("paris", "lyon", "nice", "lille")
NONE, ALONE = "none", "peers alone"
"""References without exchange: the engine, and the loop of the peers."""
OURS, SYNCHRONOUS = "dilocox", "allreduce"
LIGHT = "dilocox-work-0.005"
"""dilocox as shipped, with `control.work` at half a per cent of the processor instead of 3."""

Kind = Literal["engine", "peer"]


@dataclass(frozen=True)
class Method:
    """A method of the engine, or the script of a peer."""

    name: str
    kind: Kind
    inner_steps: int
    """H: steps in a cycle. A rough number for `dilocox`, whose controller chooses H."""
    bits: float = 32.0
    """Rough bits per value of a payload, from which the time of a cycle on the link is
    estimated."""
    overlaps: bool = False
    """Whether the exchange goes on beside computation."""
    settings: Settings = field(default_factory=dict)
    """Keys of the run file, as `section.key`; for a peer, fields of its job."""
    script: str = ""
    warm_up: int = 1
    """Number of cycles that are not measured."""
    dense_warm_up: int = 0
    """Number of steps of the warm-up that send dense values."""

    @property
    def adapts(self) -> bool:
        """Whether the controller chooses the length of rounds."""
        return self.settings.get("outer.method") == OURS

    def cycle_steps(self, ratio: float) -> float:
        """Return the time of a cycle on a link of ratio `ratio`, in inner steps."""
        link = ratio * self.bits / 32
        return max(self.inner_steps, link) if self.overlaps else self.inner_steps + link

    def cycles(self, ratio: float, least: float) -> int:
        """Return the number of cycles that take at least `least` inner steps; at least 1."""
        return max(1, math.ceil(least / self.cycle_steps(ratio)))


METHODS = (
    Method(
        SYNCHRONOUS,
        "engine",
        1,
        settings={"outer.method": "allreduce", "outer.inner_steps": 1},
    ),
    # It exchanges at every step. A round of ten steps, for accounting, has 10 x .17 bits.
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
"""All methods and peers. Peers have settings that do not slow them down: H as published, PowerSGD
at its least rank, Streaming DiLoCo at the longest delay that torchft takes. `benchmarks.quality`
measures the loss of methods."""
QUICK = (SYNCHRONOUS, OURS, "ddp", "ddp-powersgd", "torchft-streaming")
SLOWEST = (SYNCHRONOUS, "sparseloco", "dilocox-paper", OURS, LIGHT)
"""Methods on links slower than `RATIO`. One cycle of the others takes as long as 3,000 steps or
more."""
BY_NAME = {method.name: method for method in METHODS}

NO_EXCHANGE: Settings = {
    "outer.method": "diloco",
    "outer.inner_steps": 200,
    "outer.slots": 1,
    "outer.overlap": "none",
}
"""Each site in a run of its own, with an outer step every 200 inner steps. Shorter rounds, or the
codecs of `dilocox` without a receiver, would make the reference slower."""
NO_EXCHANGE_ROUNDS = 4
PROBE_ROUNDS, PROBE_STEPS = 2, 50
"""Length of the run that measures the time of a step before there is a link."""
ALONE_WARM_UP = 50
"""Steps of the peers' loop without exchange that are not measured."""
CONGESTION = "cubic"
"""Congestion control of all TCP among more than two sites, of methods and peers alike. Where
several flows share a narrow link, `bbr` leaves a fifth of it empty (docs/notes/exchange.md)."""
START_SECONDS = 15.0
"""Seconds to start and end a measurement: processes, imports, evaluation."""
FLUSH_BITS = 8.2
"""Bits per value of a run's last outer step."""


@dataclass(frozen=True)
class Case:
    """One measurement."""

    sites: int
    ratio: int
    method: str
    """Name of one of `METHODS`, or `NONE`, or `ALONE`."""
    block: int

    @property
    def key(self) -> dict[str, Any]:
        """The fields that identify a row."""
        return {
            "sites": self.sites,
            "ratio": self.ratio,
            "method": self.method,
            "block": self.block,
        }


@dataclass(frozen=True)
class Extent:
    """Number of blocks by method, and their length in inner steps."""

    core_blocks: int
    """Blocks of no exchange and of `dilocox`, at two sites and the link of `RATIO`."""
    core_blocks_elsewhere: int
    other_blocks: int
    """Number of measurements of each other method there, spread over these blocks."""
    other_blocks_elsewhere: int
    ours_steps: int
    """Inner steps of a run of `dilocox`; the first half is not measured."""
    least_steps: int
    """Other methods are measured for at least the time of this number of inner steps."""
    ratios: tuple[int, ...]
    sites: tuple[int, ...]
    methods: tuple[str, ...]


FULL = Extent(6, 3, 2, 1, 1200, 400, RATIOS, (2, 4), tuple(BY_NAME))
SHORT = Extent(2, 0, 1, 0, 500, 200, (RATIO,), (2,), QUICK)
SHORT_MINUTES = 9.5
"""Minutes of `--quick`. A measurement that would last longer is left out and named."""


def cases(extent: Extent) -> list[Case]:
    """Return all measurements in their order: block after block of each link.

    Every second block is in reverse order. Methods are spread over the blocks, so that each is
    measured some minutes from its reference. Peers are in one block with the loop of the peers.
    With more than two sites only the link of `RATIO` is measured, on slower links only `SLOWEST`.
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
    """Return the names in each block of a link.

    The reference and adaptive methods are in each of `core` blocks. Other methods are measured
    `often` times, each time spread over as many blocks as there are for it.
    """
    ours = [name for name in methods if BY_NAME[name].adapts]
    found = [[NONE, *ours] if block < core else [] for block in range(max(core, often))]
    if often:
        each = max(1, core // often)
        for block in range(each * often):
            found[block] += _group(methods, block % each, each)
    return found


def _group(methods: Sequence[str], number: int, groups: int) -> list[str]:
    """Return the other methods of block `number` out of `groups`; peers are in the last block."""
    engine = [m for m in methods if BY_NAME[m].kind == "engine" and not BY_NAME[m].adapts]
    peers = [m for m in methods if BY_NAME[m].kind == "peer"]
    share = max(1, groups - 1 if peers else groups)
    size = math.ceil(len(engine) / share)
    found = engine[number * size : (number + 1) * size]
    return [*found, *peers, ALONE] if peers and number == groups - 1 else found


def duration(case: Case, extent: Extent, step_seconds: float) -> float:
    """Return the rough seconds of a measurement, its warm-up, flush and start included."""
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
    """Return the bits on a site's link when fp32 gradients are averaged with the least traffic.

    The least traffic is 2(D-1)/D of the `parameters` values per site, with D `sites`. Headers are
    included.
    """
    payload = 4 * parameters * 2 * (sites - 1) / sites
    return payload * 8 * FRAME_BYTES / SEGMENT_BYTES


def link_of(ratio: float, parameters: int, sites: int, step_seconds: float) -> float:
    """Return the bits per second, in two digits, of the link with at least this ratio.

    The rate is rounded down, so that the ratio is reached.
    """
    rate = synchronous_bits(parameters, sites) / (ratio * step_seconds)
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.floor(rate / unit) * unit


def batch(sites: int) -> int:
    """Return the sequences per step and site."""
    return SEQUENCES // sites
