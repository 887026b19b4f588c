"""Garbage is collected by steps: nothing in between, nothing kept for good."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.inner.garbage import Collector
from dilocox.outer.loop_status import LoopStatus
from dilocox.training.batches import Batch
from dilocox.training.builder import Hooks
from dilocox.training.trainer import Trainer
from tests.support.planned_runs import run

pytestmark = pytest.mark.waits


class Node:
    """Refers to itself, as what an exception or a closure leaves behind may."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("as_before")
def test_cycles_of_steps_are_bounded() -> None:
    collector = Collector(every=5, full=4)
    made: list[weakref.ref[Node]] = []
    most = 0
    for _ in range(60):
        made.append(weakref.ref(Node()))
        collector.step()
        assert not gc.isenabled()
        most = max(most, sum(ref() is not None for ref in made))
    assert most == 4, "they wait for the collection, and no longer"


@pytest.mark.usefixtures("as_before")
def test_a_cycle_that_outlives_a_collection_goes_with_a_full_one() -> None:
    collector = Collector(every=5, full=4)
    held = [Node() for _ in range(10)]
    made = [weakref.ref(node) for node in held]
    del held[:5]
    for _ in range(4):
        collector.step()
    assert sum(ref() is not None for ref in made) == 5, "what was garbage before is gone at once"
    held = [Node() for _ in range(10)]
    made = [weakref.ref(node) for node in held]
    collector.step()
    held.clear()
    for _ in range(14):
        collector.step()
    assert all(ref() is not None for ref in made), "old ones: no young collection sees them"
    collector.step()
    assert not any(ref() is not None for ref in made)


@pytest.mark.usefixtures("as_before")
def test_python_collects_by_itself_while_nothing_is_trained() -> None:
    collector = Collector()
    collector.rest()
    assert gc.isenabled()
    collector.step()
    assert not gc.isenabled()
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    later = [Node() for _ in range(1000)]
    collector.rest()
    assert gc.isenabled()
    collector.step()
    assert not gc.isenabled()
    # Other threads may have freed some of the frozen objects by now.
    assert gc.get_freeze_count() < frozen + len(later), "objects are frozen once"


def test_a_trainer_counts_its_steps_and_rests_while_it_fetches() -> None:
    told: list[str] = []
    collector = SimpleNamespace(step=lambda: told.append("step"), rest=lambda: told.append("rest"))
    model = SimpleNamespace(inner_step=lambda *_: SimpleNamespace())
    member = SimpleNamespace(ranges=[], batch=1, steps=lambda slots: slots, place=lambda n: n)
    plan: Any = SimpleNamespace(members={"lyon": member}, inner_steps=3, slots=1, round=0,
                                first_step=0)  # fmt: skip
    trainer: Any = SimpleNamespace(
        me="lyon", collector=collector, watch=None, config=run(),
        rank=SimpleNamespace(model=model), prefetch_plan=lambda _round: None,
        batches=SimpleNamespace(step=lambda *_: Batch(None, None)),  # type: ignore[arg-type]
        meter=SimpleNamespace(add=lambda *_: None, first_step=lambda _counts: nullcontext()),
        outer=SimpleNamespace(status=LoopStatus()), tell_of_compilation=lambda: None,
        exchange=SimpleNamespace(of_step=lambda *_: None),
        control=SimpleNamespace(touch=lambda: None),
        at=SimpleNamespace(round=0), counted_from=0, hooks=Hooks(),
    )  # fmt: skip
    Trainer.train_slot(trainer, plan, 1)
    assert told == ["step"] * 3
    Trainer.enter(trainer, SimpleNamespace(catch_up=lambda: told.append("fetched")))  # type: ignore[arg-type]
    assert told[3:] == ["rest", "fetched"]
