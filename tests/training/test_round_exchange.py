"""What ends a slot, by what the method exchanges, and what is dropped that is not finite."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.errors import RunEndedError
from dilocox.training.non_finite import NonFinitePolicy
from dilocox.training.round_exchange import (
    GradientExchange,
    PseudoGradientExchange,
    RoundExchange,
    round_exchange,
)
from tests.outer.test_loop import Rank, plan

pytestmark = pytest.mark.waits

BAD = "stage 0: gradient of a"


class Site:
    """A rank of site paris with a loop and a wire, whose steps met `bad`."""

    def __init__(self, gradients: bool = False, bad: str | None = None) -> None:
        self.loop_rank = Rank()
        self.tied, self.failures = 0, list[str]()
        config = SimpleNamespace(
            exchanges_gradients=gradients, gradient_delay=0, shares_moments=False
        )
        meter = SimpleNamespace(
            non_finite=lambda: bad, dropped=None, working=lambda _counts: nullcontext()
        )
        rank = SimpleNamespace(
            states=self.loop_rank.loop.states, live=self.loop_rank.live,
            place=SimpleNamespace(stage=0), model=SimpleNamespace(sync_tied=self._sync_tied),
        )  # fmt: skip
        self.own: Any = SimpleNamespace(
            site="paris", config=config, outer=self.loop_rank.loop, rank=rank, meter=meter,
            dropped_round=-2,
        )  # fmt: skip
        client: Any = SimpleNamespace(fail=self.failures.append)
        evaluator: Any = SimpleNamespace(probe_batch=None)
        self.policy = NonFinitePolicy(self.own, client)
        self.exchange: RoundExchange = round_exchange(self.own, evaluator, self.policy)

    def _sync_tied(self, moments: bool = False) -> None:
        self.tied += 1

    @property
    def live(self) -> torch.Tensor:
        return self.loop_rank.live["a"]

    def anchor(self) -> float:
        return self.loop_rank.anchor(0)


def test_the_method_decides_what_is_exchanged() -> None:
    assert isinstance(Site().exchange, PseudoGradientExchange)
    assert Site().exchange.of_step(plan(), 0) is None
    assert isinstance(Site(gradients=True).exchange, GradientExchange)


def test_gradients_are_exchanged_in_each_step_and_the_anchor_follows_at_the_end() -> None:
    site = Site(gradients=True)
    average = site.exchange.of_step(plan(), 2)
    assert average is not None
    site.live.sub_(3.0)
    site.exchange.end_slot(plan(), 2)
    assert site.anchor() == 0.0
    site.exchange.end_slot(plan(), 4)
    assert site.anchor() == -3.0
    assert site.loop_rank.wire.keys == [], "no slot's end exchanges anything"


def test_bad_steps_drop_a_round_of_pseudo_gradients_once_and_go_back_to_the_anchor() -> None:
    site = Site(bad=BAD)
    site.live.sub_(3.0)
    site.exchange.end_slot(plan(), 1)
    assert site.own.meter.dropped is None, "it is looked at where something is exchanged"
    site.exchange.end_slot(plan(), 2)
    assert (site.own.meter.dropped, site.tied) == (BAD, 2)
    assert float(site.live[0]) == 0.0
    assert [given.contributes for given, _ in site.loop_rank.wire.given] == [False]
    site.own.meter.dropped = None
    site.loop_rank.wire.answer("lyon")
    site.exchange.end_slot(plan(), 4)
    assert site.own.meter.dropped is None


def test_bad_steps_leave_parameters_alone_where_each_step_s_mean_left_them_out() -> None:
    site = Site(gradients=True, bad=BAD)
    site.live.sub_(3.0)
    site.exchange.end_slot(plan(), 4)
    assert (site.own.meter.dropped, site.tied) == (BAD, 0)
    assert site.anchor() == float(site.live[0]) == -3.0
    assert not site.own.outer.status.dropping


def test_a_bad_pseudo_gradient_is_reported_where_it_was_dropped() -> None:
    site = Site()
    site.live[1] = float("nan")
    site.exchange.end_slot(plan(), 2)
    assert site.own.meter.dropped == "stage 0: pseudo-gradient of a[1]"


@pytest.mark.parametrize(("dropped_round", "alone"), [(2, False), (-2, True)])
def test_the_run_ends_where_dropping_does_not_help(dropped_round: int, alone: bool) -> None:
    site, third = Site(bad=BAD), plan(3)
    site.own.dropped_round = dropped_round
    if alone:
        third = plan(3, members={"paris": third.members["paris"]})
    with pytest.raises(RunEndedError, match="the last checkpoint is whole") as ended:
        site.exchange.end_slot(third, 2)
    assert site.failures == [str(ended.value)]
    assert ("second round in a row" in str(ended.value)) != alone


def test_a_flush_without_this_site_exchanges_nothing() -> None:
    site = Site()
    others = {"lyon": plan().members["lyon"]}
    site.exchange.flush(plan(1, kind="flush", inner_steps=0, slots=0, members=others))
    assert site.loop_rank.wire.keys == []
