"""The anchors by which a loss gate judges exchanges: copied once, whatever is in flight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.outer.contribution import Contribution
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout
from dilocox.outer.loop import Admission, LoopPlace, OuterLoop
from dilocox.outer.loss_gate import Gate, GateProbe
from tests.outer.test_loop import Wire, plan

SIZE = 256
NAMES = tuple("abcdefgh")


class GatedRank:
    """The single rank of site paris: eight pieces of one tensor each, and a gate."""

    def __init__(self) -> None:
        self.live = {name: torch.zeros(SIZE) for name in NAMES}
        self.wire = Wire()
        states = [
            FragmentState(Layout.of({name: (SIZE,)}), self.live, error_feedback=False)
            for name in NAMES
        ]
        self.loop = OuterLoop(
            states, self.live, LoopPlace("paris", 0, 1), self.wire.submit, self.wire.touch,
            admission=Admission(examines=True, gate=Gate(lambda model: 0.0)),
        )  # fmt: skip

    def anchors(self) -> dict[str, torch.Tensor]:
        return {name: view.clone() for name, view in self.loop.anchors().items()}

    def slot(self, given: Any, slot: int) -> None:
        for tensor in self.live.values():
            tensor.sub_(1.0)
        self.loop.end_of_slot(given, slot)


def probe_of(contribution: Contribution) -> GateProbe:
    assert isinstance(contribution.probe, GateProbe)
    return contribution.probe


def bytes_per_parameter(probes: Iterable[GateProbe]) -> float:
    """Bytes of the storages that the probes hold together, per parameter of the model."""
    tensors = [tensor for probe in probes for tensor in probe.anchors.values()]
    storages = {each.untyped_storage().data_ptr(): each.nbytes for each in tensors}
    return sum(storages.values()) / (SIZE * len(NAMES))


@pytest.mark.parametrize("fragments", [1, 4, 8])
def test_a_flush_copies_the_anchors_once(fragments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = GatedRank()
    land = rank.loop.land_due
    held: list[float] = []

    def landing(tick: int) -> None:
        held.append(bytes_per_parameter(probe_of(each) for each, _ in rank.wire.given))
        rank.wire.answer("paris")
        land(tick)

    monkeypatch.setattr(rank.loop, "land_due", landing)
    rank.loop.flush(plan(kind="flush", fragments=fragments, slots=0, delay=0))
    assert len(rank.wire.given) == fragments
    assert held == [0.0, 4.0]


def test_exchanges_in_flight_share_what_has_not_landed_between_them() -> None:
    """Of a whole round in flight: one copy of the model, and one of each piece that has landed."""
    rank, given = GatedRank(), plan(fragments=8, slots=8, delay=8)
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(3):
        current = given.model_copy(update={"round": number, "first_tick": 8 * number})
        for slot in range(1, 9):
            # The landing that is due comes before the next boundary.
            rank.wire.answer("paris")
            rank.loop.land_before(current, slot)
            anchors = rank.anchors()
            rank.slot(current, slot)
            seen[rank.wire.keys[-1]] = anchors
    pending = rank.loop.pending
    assert len(pending) == 8
    probes = [item.probe for item in pending]
    assert all(isinstance(probe, GateProbe) for probe in probes)
    assert bytes_per_parameter(probe for probe in probes if isinstance(probe, GateProbe)) == (
        4 * (1 + 7 / 8)
    )
    # Each probe has the anchors of its own boundary nevertheless.
    for contribution, _ in rank.wire.given:
        expected = seen[contribution.key.text]
        found = probe_of(contribution).anchors
        assert all(torch.equal(found[name], expected[name]) for name in NAMES)


def test_copies_differ_where_bits_do_and_go_with_their_probes() -> None:
    gate, layout = Gate(lambda model: 0.0), Layout.of({"x": (2,)})
    anchors = {"x": torch.tensor([0.0, float("nan")])}
    first = gate.probe(anchors, layout)
    assert first.anchors["x"] is not anchors["x"]
    assert gate.probe(anchors, layout).anchors["x"] is first.anchors["x"]
    anchors["x"][0] = -0.0
    second = gate.probe(anchors, layout)
    assert second.anchors["x"] is not first.anchors["x"]
    assert not first.anchors["x"].signbit()[0]
    assert second.anchors["x"].signbit()[0]
    assert len(gate._copies) == 1
    del first, second
    assert not gate._copies


def test_probes_of_a_checkpoint_share_copies_again() -> None:
    rank, given = GatedRank(), plan(fragments=8, slots=8, delay=8)
    rank.slot(given, 1)
    rank.slot(given, 2)
    rank.wire.answer("paris")
    rank.loop.states[0].anchor.fill_(3.0)
    pending = rank.loop.under_way_now()
    kept = [
        {} if item.probe is None else item.probe.tensors(rank.loop.anchors()) for item in pending
    ]
    assert [list(each) for each in kept] == [["a"], ["a"]]
    resumed = GatedRank()
    resumed.loop.states[0].anchor.fill_(3.0)
    again = [
        resumed.loop.probe_again(ExchangeKey.outer(0, 0, number), given, each)
        for number, each in enumerate(kept)
    ]
    probes = [probe for probe in again if isinstance(probe, GateProbe)]
    assert len(probes) == 2
    assert bytes_per_parameter(probes) == 4.0
    for old, new in zip(pending, probes, strict=True):
        assert isinstance(old.probe, GateProbe)
        assert all(torch.equal(old.probe.anchors[name], new.anchors[name]) for name in NAMES)
