"""Error feedback over rounds whose pieces meet and part: nothing is lost, nothing counts twice."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout
from dilocox.outer.loop import LoopPlace, OuterLoop
from tests.outer.test_loop import plan
from tests.support.simulator import LoopbackExchange

pytestmark = pytest.mark.waits

SIZES = (300, 70, 200, 130)
"""Values of each piece's one tensor."""
SITES = ("paris", "lyon")
SLOTS = 4


class Sites:
    """The real outer loops of two sites; what they hand in is exchanged at once."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._in: dict[str, dict[str, tuple[Contribution, Future[Outcome]]]] = {}
        self.live = {
            site: {f"t{n}": torch.zeros(size) for n, size in enumerate(SIZES)} for site in SITES
        }
        self.moved = {
            site: {name: tensor.double() for name, tensor in live.items()}
            for site, live in self.live.items()
        }
        """Sum of all inner displacements, negative."""
        self.loops = {site: self._loop(site) for site in SITES}
        self._drawn = torch.Generator().manual_seed(1)

    def _loop(self, site: str) -> OuterLoop:
        live = self.live[site]
        states = [
            FragmentState(Layout.of({name: (len(tensor),)}), live, error_feedback=True)
            for name, tensor in live.items()
        ]

        def submit(contribution: Contribution) -> Future[Outcome]:
            future: Future[Outcome] = Future()
            there = self._in.setdefault(contribution.key.text, {})
            there[site] = contribution, future
            if len(there) == len(SITES):
                self._exchange(contribution, there)
            return future

        return OuterLoop(states, live, LoopPlace(site), submit, lambda: None)

    def _exchange(
        self, what: Contribution, there: dict[str, tuple[Contribution, Future[Outcome]]]
    ) -> None:
        values = {}
        for site in SITES:
            given = there[site][0].values
            assert given is not None
            values[site] = given
        exchange = LoopbackExchange(what.compressor, self.mode, what.key, None)
        outcomes = exchange(values, what.weights, list(SITES))
        for site, (_, future) in there.items():
            own = outcomes[site]
            future.set_result(Outcome(own.average, SITES, own.sent, own.second_error, 0, 0.0, 1))

    def slot(self) -> None:
        for site, live in self.live.items():
            for name, tensor in live.items():
                step = torch.rand(tensor.shape, generator=self._drawn)
                tensor.sub_(step)
                self.moved[site][name] += step


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rounds=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, SLOTS)), min_size=2, max_size=7
    ),
    exchange=st.sampled_from(
        [("topk:64", "gather"), ("top1:16", "gather"), ("int4", "gather"), ("int4", "reduce")]
    ),
)
def test_what_was_sent_is_what_was_learned_less_what_waits(
    rounds: list[tuple[int, int]], exchange: tuple[str, str]
) -> None:
    """Per piece: W·ΣΔ = Σ w·δ - residuals, with another number of fragments and another delay in
    each round. δ is summed from the inner displacements."""
    codec, mode = exchange
    sites = Sites(mode)
    tick = 0
    for number, (fragments, delay) in enumerate(rounds):
        made = plan(number, first_tick=tick, fragments=fragments, delay=delay, slots=SLOTS,
                    codec=codec, exchange=mode)  # fmt: skip
        for slot in range(1, SLOTS + 1):
            sites.slot()
            for loop in sites.loops.values():
                loop.land_before(made, slot)
            for loop in sites.loops.values():
                for fragment in loop.begins(made, slot):
                    loop._begin(made, fragment, tick + slot)
            for loop in sites.loops.values():
                loop.land_due(tick + slot)
        tick += SLOTS
    for loop in sites.loops.values():
        loop.land_due(2**62)
        assert not loop.pending
    for piece in range(len(SIZES)):
        states = [loop.states[piece] for loop in sites.loops.values()]
        assert torch.equal(states[0].anchor, states[1].anchor)
        learned = torch.zeros(states[0].layout.length, dtype=torch.float64)
        for site, state in zip(SITES, states, strict=True):
            name = f"t{piece}"
            since = state.reference - state.layout.pack({name: sites.live[site][name]})
            learned += state.layout.pack({name: sites.moved[site][name].float()}).double()
            assert state.residual is not None
            learned -= since.double() + state.residual.double()
        landed = -len(SITES) * states[0].anchor.double()
        assert learned.abs().max() > 0.1
        assert torch.allclose(landed, learned, rtol=0, atol=1e-4)
