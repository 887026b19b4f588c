"""Several sites in one process: the real fragment states, averages and codecs, no network.

`Simulation` follows the calendar tick by tick. `LoopbackExchange` does what the exchange between
sites does, in memory. Both keep, in float64 and independently of the states, what a test
needs to check them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilocox.compression import FragmentCodec, LowRank
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.coordinator.protocol.step_share import FULL, steps_taken
from dilocox.outer.averaging import average, chunk_bounds, requantise
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout, split_pieces
from dilocox.outer.outer_step import Rule
from dilocox.transport.exchange import advancing
from tests.support.recorded_course import Timing, events_at, landings_after


@dataclass
class Outcome:
    """What one site gets from an exchange."""

    average: Tensor | None
    sent: Tensor | None
    second_error: tuple[int, Tensor] | None
    advance: Callable[[Tensor], Tensor] | None = None


@dataclass
class LoopbackExchange:
    """`gather` or `reduce` among `sites`, all of which are there; `counted` ones contribute."""

    compressor: FragmentCodec
    mode: str
    key: ExchangeKey
    warm: Tensor | None = None

    def __call__(
        self,
        contributions: Mapping[str, Tensor],
        weights: Mapping[str, float],
        counted: Sequence[str],
    ) -> dict[str, Outcome]:
        agreement = self.compressor.agreement
        if agreement is not None:
            return self._low_rank(agreement, contributions, weights, counted)
        length = next(iter(contributions.values())).numel()
        seed = zlib.crc32(self.key.text.encode())
        sites = list(contributions)
        alone = [weights[site] for site in counted]
        owners = sites if self.mode == "reduce" else ["everyone"]
        sent = {site: torch.empty(length) for site in sites}
        result = torch.empty(length)
        second: dict[str, tuple[int, Tensor]] = {}
        for owner, (start, end) in zip(owners, chunk_bounds(length, len(owners)), strict=True):
            part = self.compressor.part(start, end, seed)
            for site, u in contributions.items():
                sent[site][start:end] = part.decode(part.encode(u[start:end]))
            if counted:
                mean = average((sent[site][start:end] for site in counted), alone)
                if self.mode == "reduce":
                    again = requantise(part, mean, sum(alone))
                    second[owner] = (start, again.second_error)
                    mean = again.decoded
                result[start:end] = mean
        return {
            site: Outcome(
                result if counted else None,
                sent[site] if site in counted else None,
                second.get(site),
            )
            for site in sites
        }

    def _low_rank(
        self,
        codec: LowRank,
        contributions: Mapping[str, Tensor],
        weights: Mapping[str, float],
        counted: Sequence[str],
    ) -> dict[str, Outcome]:
        assert self.warm is not None
        basis = codec.orthonormalise([codec.project(u, self.warm) for u in contributions.values()])
        payloads = {site: codec.encode(u, basis) for site, u in contributions.items()}
        sent = {site: codec.decode(payload, basis) for site, payload in payloads.items()}
        if not counted:
            return {site: Outcome(None, None, None) for site in contributions}
        alone = [weights[site] for site in counted]
        chosen = [payloads[site] for site in counted]
        advance = advancing(codec, self.key, chosen, alone, basis)
        mean = average((sent[site] for site in counted), alone)
        return {
            site: Outcome(mean, sent[site] if site in counted else None, None, advance)
            for site in contributions
        }


@dataclass
class Site:
    """One site: its parameters and how it trains them."""

    live: dict[str, Tensor]
    inner_step: Callable[[dict[str, Tensor], int], None]
    """(live, step) changes `live` in place."""
    states: list[FragmentState] = field(default_factory=list)
    moved: dict[str, Tensor] = field(default_factory=dict)
    """Sum of inner displacements since the last boundary, float64, by tensor."""


@dataclass
class Settings:
    """A run's numbers, named as in the run file."""

    overlap: str = "none"
    keep: float = 1.0
    learning_rate: float = 1.0
    momentum: float = 0.0
    codec: str = "none"
    exchange: str = "gather"
    error_feedback: bool = False
    residual_decay: float = 1.0
    residual_view: float = 0.0
    steps_per_slot: int = 1
    slots: int = 1
    fragments: int = 1
    delay: int = 0
    weights: Callable[[int, str], float] = lambda round_, site: 1.0
    """w_i of a round."""
    paces: Mapping[str, int] = field(default_factory=dict)
    """Speeds in thousandths of the typical site's, of sites that differ."""
    counted: Callable[[int, str], bool] = lambda round_, site: True
    """Whether the site is in the contribution set of a round."""


class Simulation:
    """Sites that train together."""

    def __init__(self, settings: Settings, sites: Mapping[str, Site]) -> None:
        self.settings = settings
        self.sites = dict(sites)
        live = next(iter(self.sites.values())).live
        sizes = {name: tensor.numel() for name, tensor in live.items()}
        groups = split_pieces(sizes, settings.fragments)
        self.layouts = [Layout.of({name: live[name].shape for name in names}) for names in groups]
        for site in self.sites.values():
            site.moved = {name: t.double().zero_() for name, t in site.live.items()}
            site.states = [
                FragmentState(
                    layout,
                    site.live,
                    error_feedback=settings.error_feedback,
                    eager=settings.overlap == "eager",
                )
                for layout in self.layouts
            ]
        self.applied = [torch.zeros(each.length, dtype=torch.float64) for each in self.layouts]
        """Sum over landings of W·Δ, by fragment."""
        self.contributed = [torch.zeros_like(each) for each in self.applied]
        """Sum over boundaries and sites of w·δ, from the displacements themselves."""
        self.landings = 0
        self.jumps: list[tuple[Tensor, Tensor]] = []
        """Mean over the sites of a fragment's live values before and after each landing."""
        self._timings: list[Timing] = []
        self._flying: dict[tuple[int, int], tuple[dict[str, Outcome], list[str], float]] = {}
        self._tick = 0
        self._step = 0

    def run(self, rounds: int) -> None:
        """Train; what has not landed at the end stays in the air."""
        settings = self.settings
        for _ in range(rounds):
            self._timings.append(
                Timing(
                    len(self._timings),
                    self._tick,
                    settings.slots,
                    settings.fragments,
                    settings.delay,
                )
            )
            for _ in range(settings.slots):
                self._train_slot()
                self._tick += 1
                for event in events_at(self._tick, self._timings, stage=0, stages=1):
                    act = self._land if event.kind == "landing" else self._boundary
                    act(event.round, event.fragment)

    def flush(self) -> None:
        """Land what is in the air, then send what is left in 8 bits and land it at once."""
        for event in landings_after(self._tick, self._timings, stage=0, stages=1):
            self._land(event.round, event.fragment)
        after = len(self._timings)
        for fragment in range(len(self.layouts)):
            self._boundary(after, fragment, flush=True)
            self._land(after, fragment, flush=True)

    def _train_slot(self) -> None:
        for _ in range(self.settings.steps_per_slot):
            for own, site in self.sites.items():
                pace = self.settings.paces.get(own, FULL)
                if steps_taken(pace, 0, self._step + 1) == steps_taken(pace, 0, self._step):
                    continue
                before = {name: tensor.double() for name, tensor in site.live.items()}
                site.inner_step(site.live, self._step)
                for name, tensor in site.live.items():
                    site.moved[name] += tensor.double() - before[name]
            self._step += 1

    def _boundary(self, round_: int, fragment: int, flush: bool = False) -> None:
        settings, layout = self.settings, self.layouts[fragment]
        weights = {name: settings.weights(round_, name) for name in self.sites}
        counted = [name for name in self.sites if flush or settings.counted(round_, name)]
        contributions = {}
        for name, site in self.sites.items():
            decay = 1.0 if flush else settings.residual_decay
            u, finite = site.states[fragment].boundary(site.live, weights[name], decay)
            assert finite
            contributions[name] = u
            for tensor, view in layout.views(self.contributed[fragment]).items():
                view -= weights[name] * site.moved[tensor]
                site.moved[tensor].zero_()
        name = "int8" if flush else settings.codec
        states = [site.states[fragment] for site in self.sites.values()]
        for state in states:
            chosen = state.compressor(name)
        key = ExchangeKey.outer(round_, 0, fragment)
        exchange = LoopbackExchange(chosen, settings.exchange, key, states[0].warm)
        outcomes = exchange(contributions, weights, counted)
        for name, site in self.sites.items():
            outcome = outcomes[name]
            site.states[fragment].committed(contributions[name], outcome.sent, outcome.second_error)
        total = sum(weights[name] for name in counted)
        self._flying[round_, fragment] = (outcomes, counted, total)

    def _land(self, round_: int, fragment: int, flush: bool = False) -> None:
        settings, layout = self.settings, self.layouts[fragment]
        outcomes, counted, total = self._flying.pop((round_, fragment))
        before = sum(layout.pack(site.live).double() for site in self.sites.values())
        for name, site in self.sites.items():
            rule = Rule(
                overlap="none" if flush else settings.overlap,  # type: ignore[arg-type]
                learning_rate=settings.learning_rate,
                momentum=settings.momentum,
                keep=settings.keep,
                share=settings.weights(round_, name) / total if name in counted else 0.0,
                residual=0.0 if flush else settings.residual_view / settings.weights(round_, name),
            )
            state, advance = site.states[fragment], outcomes[name].advance
            state.land(site.live, outcomes[name].average, rule)
            if advance is not None:
                assert state.warm is not None
                state.warm = advance(state.warm)
        after = sum(layout.pack(site.live).double() for site in self.sites.values())
        assert isinstance(before, Tensor)
        assert isinstance(after, Tensor)
        self.jumps.append((before / len(self.sites), after / len(self.sites)))
        if counted:
            landed = outcomes[counted[0]].average
            assert landed is not None
            self.applied[fragment] += total * landed.double()
        self.landings += 1
        digests = {site.states[fragment].digest() for site in self.sites.values()}
        assert len(digests) == 1, "the sites disagree about anchor or momentum"
