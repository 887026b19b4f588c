"""Pieces that are exchanged together in one round and apart in another."""

from __future__ import annotations

import pytest
import torch

from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.errors import ExchangeError, TrainingError
from dilocox.outer.contribution import Outcome
from dilocox.outer.fragment_group import FragmentGroup, fragment_of
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.in_flight import Pending
from dilocox.outer.layout import Layout
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.outer.snapshot import Snapshot
from tests.outer.test_loop import Rank, plan

pytestmark = pytest.mark.waits


def states(*sizes: int) -> tuple[dict[str, torch.Tensor], list[FragmentState]]:
    live = {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    held = [
        FragmentState(Layout.of({name: (len(tensor),)}), live, error_feedback=True)
        for name, tensor in live.items()
    ]
    return live, held


def test_layouts_one_behind_the_other_are_that_of_all_tensors() -> None:
    shapes = {"a": (3,), "b": (130,), "c": (2, 65), "d": ()}
    parts = [{"a": (3,), "b": (130,)}, {"c": (2, 65)}, {"d": ()}]
    assert Layout.joined([Layout.of(part) for part in parts]) == Layout.of(shapes)


def test_what_pieces_send_together_is_what_they_would_send_apart() -> None:
    live, together = states(100, 300)
    same, alone = states(100, 300)
    for number, (a, b) in enumerate(zip(live.values(), same.values(), strict=True)):
        a.sub_(number + 1.0)
        b.sub_(number + 1.0)
    whole = fragment_of(together, 0, 1)
    u, fine, bad = whole.boundary(live, 0.5, 0.9)
    assert (fine, bad) == (True, None)
    apart = [state.boundary(same, 0.5, 0.9)[0] for state in alone]
    assert torch.equal(u, torch.cat(apart))
    assert u.unique().tolist() == [0.0, 0.5, 1.0]
    # Half of it is seen; what an owner's second quantisation withheld lies in both pieces.
    sent, error = u * 0.5, torch.arange(60.0)
    whole.committed(u, sent, (100, error))
    for state, v, start in zip(alone, apart, (0, 128), strict=True):
        state.committed(v, v * 0.5)
        assert state.residual is not None
        low, high = max(100, start), min(160, start + len(v))
        state.residual[low - start : high - start] += error[low - 100 : high - 100]
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours.residual, theirs.residual)  # type: ignore[arg-type]


def test_a_value_that_is_not_finite_keeps_its_whole_fragment_at_home() -> None:
    """The other piece's progress is not lost: it waits in its residual."""
    live, held = states(3, 3)
    live["t0"].sub_(1.0)
    live["t1"][1] = float("nan")
    whole = fragment_of(held, 0, 1)
    u, fine, bad = whole.boundary(live, 1.0, 1.0)
    assert (fine, bad) == (False, "t1[1]")
    whole.committed(u, None)
    assert held[0].residual is not None
    assert held[1].residual is not None
    assert held[0].residual[:3].tolist() == [1.0, 1.0, 1.0]
    assert held[1].residual[:3].tolist() == [0.0, 0.0, 0.0]


def test_pieces_with_a_basis_each_are_not_exchanged_together() -> None:
    _, held = states(3, 3)
    assert FragmentGroup(held[:1]).compressor("lowrank:2")
    with pytest.raises(TrainingError, match="cannot be exchanged together"):
        fragment_of(held, 0, 1).compressor("lowrank:2")


def test_pieces_meet_and_part_from_round_to_round() -> None:
    rank = Rank()
    together = {"fragments": 1}
    assert rank.round(plan(0, **together), "paris", "lyon") == [False, False, False, True]
    assert rank.wire.keys == ["outer/0/0/0"]
    # Both pieces landed at slot 2 of this round, then each has its own boundary.
    rank.round(plan(1), "paris", "lyon")
    assert rank.wire.keys[1:] == ["outer/1/0/0", "outer/1/0/1"]
    assert (rank.anchor(0), rank.anchor(1)) == (-6.0, -4.0)
    # Piece 1 is under way until slot 2; at slot 4 both have the boundary.
    rank.round(plan(2, **together), "paris", "lyon")
    assert (rank.anchor(0), rank.anchor(1)) == (-6.0, -8.0)
    rank.loop.land_due(14)
    assert (rank.anchor(0), rank.anchor(1)) == (-12.0, -12.0)
    assert float(rank.live["a"][0]) == float(rank.live["b"][0]) == -12.0
    counts = rank.loop.status.counts
    assert (counts.exchanges, counts.values) == (4, (2 + 1 + 1 + 2) * 128)


def test_what_is_under_way_of_a_piece_lands_at_its_next_boundary() -> None:
    rank = Rank()
    rank.round(plan(0, fragments=1, delay=4), "paris", "lyon")
    assert rank.loop.under_way(0, 1)
    assert rank.loop.under_way(1, 1)
    # Piece 0 begins at slot 2: what it was exchanged with lands with it, two slots early.
    rank.train()
    rank.loop.end_of_slot(plan(1), 1)
    assert rank.loop.has_due(plan(1), 2)
    rank.loop.end_of_slot(plan(1), 2)
    assert (rank.anchor(0), rank.anchor(1)) == (-4.0, -4.0)
    assert [item.key.text for item in rank.loop.pending] == ["outer/1/0/0"]
    # And the other way round: a fragment of both waits for neither.
    rank.wire.answer("paris", "lyon")
    later = plan(2, fragments=1, slots=1, inner_steps=1, delay=1)
    rank.loop.end_of_slot(later, 1)
    assert [item.key.text for item in rank.loop.pending] == ["outer/2/0/0"]


def test_of_pieces_that_enter_each_takes_what_landed_after_its_own_copy() -> None:
    rank = Rank()
    rank.loop.status.expect({0, 1})
    alone = {"members": {"lyon": plan().members["lyon"]}, "fragments": 1, "delay": 1}
    rank.loop.end_of_slot(plan(**alone), 4)
    rank.wire.answer("lyon")
    rank.loop.land_due(5)
    state = {"anchor": torch.full((128,), 6.0), "momentum": torch.zeros(128)}
    # Piece 0 was copied after the landing at 5, piece 1 before.
    rank.loop.adopt(Snapshot(0, 5, state))
    assert rank.anchor(0) == 6.0
    rank.loop.adopt(Snapshot(1, 4, state))
    assert (rank.anchor(0), rank.anchor(1)) == (6.0, 5.0)
    assert rank.loop.status.counts.exchanges == 1


def test_a_piece_that_is_here_does_not_wait_for_one_that_is_not() -> None:
    rank = Rank()
    rank.loop.status.expect({1})
    alone = {"members": {"lyon": plan().members["lyon"]}, "fragments": 1, "delay": 1}
    rank.loop.end_of_slot(plan(**alone), 4)
    rank.wire.answer("lyon")
    rank.loop.land_due(5)
    assert (rank.anchor(0), rank.anchor(1)) == (-1.0, 0.0)
    state = {"anchor": torch.full((128,), 6.0), "momentum": torch.zeros(128)}
    rank.loop.adopt(Snapshot(1, 4, state))
    assert (rank.anchor(0), rank.anchor(1)) == (-1.0, 5.0)
    assert rank.loop.status.counts.exchanges == 1


@pytest.mark.parametrize("what", ["average", "sent"])
def test_values_of_another_length_than_the_fragment_s_do_not_land(what: str) -> None:
    rank = Rank()
    rank.loop.end_of_slot(plan(), 2)
    (given, future), *_ = rank.wire.given
    assert given.values is not None
    longer = torch.ones(2 * given.length)
    average, sent = (longer, given.values) if what == "average" else (given.values, longer)
    future.set_result(Outcome(average, ("paris", "lyon"), sent, None, 0, 0.0, 1))
    with pytest.raises((ExchangeError, RuntimeError), match="256"):
        rank.loop.land_due(4)
    assert rank.anchor(0) == 0.0


def test_gradients_are_of_all_that_a_rank_holds_whatever_the_plan_calls_it() -> None:
    """`outer.fragments` has no effect on methods that exchange gradients."""
    rank = Rank()
    loop = OuterLoop(
        rank.loop.states[:1], rank.live, LoopPlace("paris"), rank.wire.submit, rank.wire.touch
    )
    key, several = ExchangeKey.gradient(0, 1, 0), plan(fragments=4)
    assert loop.probe_again(key, several, {}) is None
    u = torch.ones(128)
    loop.restore([Pending.waiting(key, several, 0, u, True)], [], dropping=False)
    loop.resume_in_flight()
    assert rank.wire.keys == [key.text]


def test_an_exchange_of_a_checkpoint_begins_again_as_its_own_plan_had_it() -> None:
    rank = Rank()
    u = torch.cat([torch.full((128,), 2.0), torch.full((128,), 3.0)])
    key = ExchangeKey.outer(0, 0, 0)
    rank.loop.restore([Pending.waiting(key, plan(fragments=1), 4, u, True)], [], dropping=False)
    rank.loop.resume_in_flight()
    rank.wire.answer("paris", "lyon")
    rank.loop.land_due(4)
    assert (rank.anchor(0), rank.anchor(1)) == (-2.0, -3.0)
