"""One fragment's state: jumps, residuals, bad values, saving and loading."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression import Compressor, LowRank, codec
from dilocox.errors import CheckpointError, ExchangeError, TrainingError
from dilocox.outer.fragment_state import FragmentState, digest_thread, digests, tensors_digest
from dilocox.outer.layout import Layout
from dilocox.outer.outer_step import Rule, local_view, nesterov_step
from dilocox.utils.cache_blocks import blocks

pytestmark = pytest.mark.waits

SHAPES = {"a.weight": (5, 7), "a.bias": (0,), "b": (130,)}
LAYOUT = Layout.of(SHAPES)
PLAIN = Rule("none", learning_rate=1.0, momentum=0.0)


def live_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat_of(seed: int) -> Tensor:
    return LAYOUT.pack(live_of(seed))


def move(live: dict[str, Tensor], by: float) -> None:
    for tensor in live.values():
        tensor.add_(by)


def make(
    live: dict[str, Tensor],
    error_feedback: bool = True,
    eager: bool = False,
    momentum_dtype: torch.dtype = torch.float32,
) -> FragmentState:
    return FragmentState(
        LAYOUT, live, error_feedback=error_feedback, eager=eager, momentum_dtype=momentum_dtype
    )


def test_contribution_is_the_weighted_displacement_and_the_decayed_residual() -> None:
    live = live_of(0)
    state = make(live)
    before = LAYOUT.pack(live)
    assert state.residual is not None
    state.residual.copy_(flat_of(5))
    move(live, 0.25)
    u, finite = state.boundary(live, weight=1.5, decay=0.5)
    assert finite
    expected = (before - LAYOUT.pack(live)) * 1.5 + flat_of(5) * 0.5
    assert torch.allclose(u, expected, rtol=0, atol=1e-6)
    again, _ = state.boundary(live, weight=1.5, decay=0.5)
    assert not again.any(), "the residual and the displacement are in the first contribution"
    state.committed(again, again)
    sent = codec("int4").decode(codec("int4").encode(u), LAYOUT.length)
    state.committed(u, sent, (128, torch.full((128,), 2.0)))
    error = u - sent
    error[128:256] += 2.0
    assert torch.equal(state.residual, error)


def test_frozen_tensors_have_gradients_of_zero() -> None:
    state = make(live_of(0), error_feedback=False)
    given = {name: tensor for name, tensor in live_of(1).items() if name != "b"}
    u, finite = state.gradients(given, weight=2.0, decay=1.0)
    views = LAYOUT.views(u)
    assert finite
    assert torch.equal(views["a.weight"], 2.0 * given["a.weight"])
    assert not views["b"].any()


def test_without_error_feedback_nothing_is_kept() -> None:
    live = live_of(0)
    state = make(live, error_feedback=False)
    move(live, 1.0)
    u, _ = state.boundary(live, 1.0, 1.0)
    state.committed(u, None, None)
    assert state.residual is None
    again, _ = state.boundary(live, 1.0, 1.0)
    assert not again.any()


@given(
    overlap=st.sampled_from(["none", "naive", "keep", "eager"]),
    keep=st.floats(0, 1),
    share=st.floats(0, 1),
    jumps=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_jump_is_a_displacement(overlap: str, keep: float, share: float, jumps: int) -> None:
    rule = Rule(overlap, 0.7, 0.5, keep, share)  # type: ignore[arg-type]
    live = live_of(0)
    state = make(live, eager=True)
    state.boundary(live, 1.0, 1.0)
    for number in range(jumps):
        move(live, 0.125)
        state.land(live, flat_of(number), rule)
    u, _ = state.boundary(live, 1.0, 1.0)
    for view in LAYOUT.views(u).values():
        assert torch.allclose(view, torch.full_like(view, -0.125 * jumps), rtol=0, atol=3e-6)


def test_rules_put_the_site_where_they_say() -> None:
    anchor, moved, own = flat_of(1), flat_of(2), flat_of(3)
    kept = anchor.clone(), moved.clone(), own.clone()
    for overlap in ("none", "naive"):
        assert torch.equal(local_view(Rule(overlap, 1, 0), anchor, moved, None), anchor)
    keep = local_view(Rule("keep", 1, 0, keep=0.65), anchor, moved, None)
    assert torch.allclose(keep, anchor + 0.65 * moved)
    assert torch.equal(local_view(Rule("keep", 1, 0), anchor, moved, None), moved + anchor)
    eager = local_view(Rule("eager", 0.7, 0.9, share=0.25), anchor, moved, own)
    fresh = -0.25 * moved
    expected = anchor - 0.7 * (fresh + 0.9 * (0.9 * own + fresh))
    assert torch.allclose(eager, expected, rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(kept, (anchor, moved, own), strict=True))
    with pytest.raises(TrainingError, match="eager=True"):
        local_view(Rule("eager", 1, 0), anchor, moved, None)


def test_a_site_keeps_a_share_of_its_residual_in_what_it_trains_on() -> None:
    """Under every rule, and in no pseudo-gradient: what is sent of it still counts once."""
    anchor, moved, own, residual = (flat_of(number) for number in range(1, 5))
    for overlap in ("none", "naive", "keep", "eager"):
        rule = Rule(overlap, 0.7, 0.9, share=0.25)
        plain = local_view(rule, anchor, moved, own, residual)
        less = local_view(replace(rule, residual=0.2), anchor, moved, own, residual)
        assert torch.allclose(plain - less, 0.2 * residual, rtol=0, atol=1e-6)
    assert torch.equal(local_view(Rule("none", 1, 0, residual=0.2), anchor, moved, None), anchor)

    live = live_of(0)
    state = make(live)
    u, _ = state.boundary(live, 1.0, 1.0)
    state.committed(u + residual, u)
    state.land(live, flat_of(2), Rule("keep", 0.7, 0.5, residual=0.5))
    assert torch.allclose(LAYOUT.pack(live), state.anchor - 0.5 * residual, rtol=0, atol=1e-6)
    again, _ = state.boundary(live, 1.0, 1.0)
    assert torch.allclose(again, residual, rtol=0, atol=1e-6)


def test_own_parts_of_the_momentum_add_up_to_it() -> None:
    """Two sites, overlap `eager`: what every site thinks its own is, is the whole together."""
    lives = [live_of(0), live_of(0)]
    states = [make(live, eager=True) for live in lives]
    weights = [0.5, 1.5]
    for number in range(4):
        us = []
        for site, (state, live, weight) in enumerate(zip(states, lives, weights, strict=True)):
            move(live, 0.1 * (number + 1) * (site + 1))
            us.append(state.boundary(live, weight, 1.0)[0])
        mean = (us[0] + us[1]) / sum(weights)
        for state, live, weight in zip(states, lives, weights, strict=True):
            rule = Rule("eager", 0.7, 0.9, share=weight / sum(weights))
            state.land(live, mean, rule)
    assert states[0].own is not None
    assert states[1].own is not None
    assert states[0].own.abs().max() > 0.1
    assert torch.allclose(states[0].own + states[1].own, states[0].momentum, atol=1e-6)


def test_landing_steps_the_anchor_once_and_none_leaves_it() -> None:
    live = live_of(0)
    state = make(live)
    anchor, momentum = state.anchor.clone(), state.momentum.clone()
    move(live, 1.0)
    state.land(live, None, Rule("keep", 0.7, 0.9, keep=1.0))
    assert torch.equal(state.anchor, anchor)
    assert not state.momentum.any()
    assert torch.allclose(live["b"], live_of(0)["b"] + 1.0, atol=1e-6)
    state.land(live, flat_of(3), Rule("naive", 0.7, 0.9))
    nesterov_step(anchor, momentum, flat_of(3), 0.7, 0.9)
    assert torch.equal(state.anchor, anchor)
    assert torch.equal(state.momentum, momentum)
    assert torch.equal(LAYOUT.pack(live), anchor)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_non_finite_displacement_is_given_up(error_feedback: bool) -> None:
    live = live_of(0)
    state = make(live, error_feedback=error_feedback, eager=True)
    if state.residual is not None:
        state.residual.copy_(flat_of(5))
    live["b"][17] = float("nan")
    u, finite = state.boundary(live, 1.0, 0.5)
    assert not finite
    assert state.non_finite == "b[17]"
    state.committed(u, None)
    if state.residual is not None:
        assert torch.equal(state.residual, flat_of(5))
    assert torch.equal(LAYOUT.pack(live), state.anchor)
    move(live, 0.5)
    u, finite = state.boundary(live, 1.0, 1.0)
    assert finite
    assert state.non_finite is None
    expected = torch.full((130,), -0.5) + (flat_of(5)[128:258] if error_feedback else 0.0)
    assert torch.allclose(u[128:258], expected, atol=1e-6)


@pytest.mark.parametrize(("value", "usable"), [(2.0**40, True), (1.2e12, False), (-1.2e12, False)])
def test_what_no_model_comes_back_from_is_given_up(value: float, usable: bool) -> None:
    """And what a low-rank codec is given, it can send."""
    layout = Layout.of({"a": (64, 130)})
    live = {"a": torch.zeros(64, 130)}
    state = FragmentState(layout, live, error_feedback=True)
    live["a"].add_(value)
    u, finite = state.boundary(live, -1.0, 1.0)
    assert finite == usable
    assert (state.non_finite is None) == usable
    if usable:
        low = LowRank(layout.geometry, 2)
        basis = low.orthonormalise([low.project(u, low.first_warm())])
        assert torch.isfinite(low.decode(low.encode(u, basis), basis)).all()


def test_bad_averages_change_nothing() -> None:
    live = live_of(0)
    state = make(live)
    digest = state.digest()
    move(live, 1.0)
    bad = flat_of(1)
    bad[130] = float("inf")
    with pytest.raises(TrainingError, match=r"of b\[2\] is inf"):
        state.land(live, bad, PLAIN)
    with pytest.raises(ExchangeError, match="cannot land on a fragment of 384"):
        state.land(live, flat_of(1)[:128], PLAIN)
    assert state.digest() == digest
    assert torch.equal(live["b"], live_of(0)["b"] + 1.0)


def test_going_on_from_the_anchor() -> None:
    live = live_of(0)
    state = make(live)
    assert state.residual is not None
    state.residual.copy_(flat_of(5))
    move(live, 3.0)
    state.reset_to_anchor(live)
    assert torch.equal(live["b"], live_of(0)["b"])
    assert torch.equal(state.residual, flat_of(5))
    state.reset_to_anchor(live, keep_residual=False)
    u, _ = state.boundary(live, 1.0, 1.0)
    assert not u.any()


def test_entering_takes_over_what_is_agreed() -> None:
    donor_live, live = live_of(0), live_of(1)
    donor, state = make(donor_live), make(live, eager=True)
    donor.land(donor_live, flat_of(2), Rule("none", 0.7, 0.9))
    assert state.residual is not None
    state.residual.copy_(flat_of(5))
    with pytest.raises(ExchangeError, match="momentum: expected"):
        state.adopt(live, {**donor.agreed(), "momentum": donor.momentum[:128]})
    state.adopt(live, donor.agreed())
    assert state.digest() == donor.digest()
    assert torch.equal(LAYOUT.pack(live), donor.anchor)
    assert not state.residual.any()
    assert not state.boundary(live, 1.0, 1.0)[0].any()


def test_anchor_from_live_parameters() -> None:
    live = live_of(0)
    state = make(live)
    move(live, 1.0)
    state.take_anchor_from(live)
    assert torch.equal(state.anchor, LAYOUT.pack(live))
    assert not state.boundary(live, 1.0, 1.0)[0].any()


@pytest.mark.parametrize(("overlap", "eager"), [("keep", False), ("eager", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_it_goes_on_the_same(
    overlap: str, eager: bool, dtype: torch.dtype
) -> None:
    rule = Rule(overlap, 0.7, 0.9, keep=0.6, share=0.5)  # type: ignore[arg-type]

    def round_of(state: FragmentState, live: dict[str, Tensor], number: int) -> None:
        move(live, 0.01 * number)
        u, _ = state.boundary(live, 1.25, 0.95)
        sent = codec("int4").decode(codec("int4").encode(u), LAYOUT.length)
        state.committed(u, sent)
        move(live, 0.02)
        state.land(live, sent, rule)

    live = live_of(0)
    state = make(live, eager=eager, momentum_dtype=dtype)
    for number in range(3):
        round_of(state, live, number)
    saved = {name: tensor.clone() for name, tensor in state.state_tensors().items()}
    other_live = {name: tensor.clone() for name, tensor in live.items()}
    other = make(live_of(9), eager=eager, momentum_dtype=dtype)
    other.load(saved)
    for number in range(3, 6):
        round_of(state, live, number)
        round_of(other, other_live, number)
    assert tensors_digest(state.state_tensors()) == tensors_digest(other.state_tensors())
    assert tensors_digest(live) == tensors_digest(other_live)


def test_the_warm_start_of_low_rank_is_agreed_saved_and_fitted() -> None:
    live = {"matrix": torch.zeros(96, 64), "bias": torch.zeros(64)}
    layout = Layout.of({name: tensor.shape for name, tensor in live.items()})

    def fresh() -> FragmentState:
        return FragmentState(layout, live, error_feedback=True)

    state = fresh()
    before = state.digest()
    assert isinstance(state.compressor("int8"), Compressor)
    assert state.warm is None
    codec = state.compressor("lowrank:2")
    assert isinstance(codec, LowRank)
    assert state.warm is not None
    assert len(state.warm) == codec.warm_length
    assert state.digest() != before
    # The flush, in another codec, leaves it; another rank keeps what directions it can.
    state.compressor("int8")
    assert state.warm_codec == "lowrank:2"
    state.warm[:] = torch.arange(len(state.warm)) / 10
    assert {"anchor", "momentum", "warm"} == state.agreed().keys()
    other = fresh()
    other.load({name: t.clone() for name, t in state.state_tensors().items()}, state.warm_codec)
    assert other.digest() == state.digest()
    entered = fresh()
    entered.adopt(live, state.agreed(), state.warm_codec)
    assert entered.digest() == state.digest()
    for each in (state, other, entered):
        narrower = each.compressor("lowrank:1")
        assert isinstance(narrower, LowRank)
        assert each.warm is not None
        assert len(each.warm) == narrower.warm_length
        assert float(each.warm.abs().max()) > 2.0
    assert len({each.digest() for each in (state, other, entered)}) == 1
    with pytest.raises(CheckpointError, match="fragment state holds"):
        fresh().load(state.state_tensors())


def test_what_does_not_fit_is_not_loaded() -> None:
    live = live_of(0)
    state = make(live)
    before = tensors_digest(state.state_tensors())
    with pytest.raises(CheckpointError, match="overlap or error feedback differ"):
        state.load(make(live_of(1), error_feedback=False).state_tensors())
    wrong = make(live_of(1)).state_tensors()
    wrong["momentum"] = wrong["momentum"].half()
    with pytest.raises(CheckpointError, match="momentum: expected"):
        state.load(wrong)
    assert tensors_digest(state.state_tensors()) == before
    narrow = make(live_of(1), momentum_dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"momentum: expected torch.float32 .* got torch.bf"):
        state.load(narrow.state_tensors())
    with pytest.raises(ExchangeError, match=r"momentum: expected torch.bfloat16"):
        narrow.adopt(live, state.agreed())


def test_digest_sees_names_shapes_dtypes_and_bits() -> None:
    base = {"a": torch.zeros(4), "b": torch.ones(2, 2)}
    others = [
        {"a": torch.zeros(4), "c": torch.ones(2, 2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(2, 2)},
        {"a": -torch.zeros(4), "b": torch.ones(2, 2)},
        {"a": torch.ones(2, 2), "b": torch.zeros(4)},
    ]
    digests = {tensors_digest(each) for each in [base, *others]}
    assert len(digests) == 6
    assert tensors_digest(dict(reversed(base.items()))) == tensors_digest(base)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.land(live_of(0), flat_of(2), PLAIN),
        lambda state: state.take_anchor_from(live_of(9)),
        lambda state: state.adopt(live_of(0), {"anchor": flat_of(7), "momentum": flat_of(8)}),
        lambda state: state.load(make(live_of(4)).state_tensors()),
        lambda state: state.compressor("lowrank:2"),
    ],
    ids=["land", "take_anchor_from", "adopt", "load", "compressor"],
)
def test_a_digest_computed_beside_training_is_of_the_state_as_it_is(
    change: Callable[[FragmentState], object],
) -> None:
    state, twin = make(live_of(0)), make(live_of(0))
    before = twin.digest()
    with digest_thread() as pool:
        state.start_digest(pool)
        assert state.digest() == before
        state.start_digest(pool)
        change(state)
        change(twin)
        assert state.digest() == twin.digest() != before


@pytest.mark.parametrize("count", range(5))
def test_digests_of_several_pieces_are_those_of_each_in_order(count: int) -> None:
    states = [make(live_of(seed)) for seed in range(count)]
    alone = [state.digest() for state in states]
    with digest_thread() as pool:
        for state in states[:2]:
            state.start_digest(pool)
        assert digests(states) == alone
    assert len(set(alone)) == count
    assert not any(state.hashed for state in states), "a later digest is of later tensors"


@pytest.mark.parametrize("overlap", ["keep", "eager"])
@pytest.mark.parametrize("spoilt", [False, True])
def test_blocks_change_no_bit(
    overlap: Literal["keep", "eager"], spoilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of one block, and the same in blocks that tensors do not end with."""
    rule = Rule(overlap, 0.8, 0.5, keep=0.9, share=0.4, residual=0.1)

    def course() -> dict[str, Tensor]:
        live = live_of(0)
        state = make(live, eager=overlap == "eager")
        for turn in range(3):
            move(live, 0.1 + turn)
            if spoilt and turn == 1:
                live["b"][100] = math.nan
            u, _ = state.boundary(live, 1.5, 0.9)
            sent = codec("int4").decode(codec("int4").encode(u), LAYOUT.length)
            state.committed(u, None if spoilt and turn == 1 else sent)
            state.land(live, 0.1 * flat_of(turn), rule)
        return {**state.state_tensors(), **live, "u": u}

    whole = course()
    monkeypatch.setattr("dilocox.utils.cache_blocks.PER_THREAD", 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert len(list(blocks(flat_of(0)))) == 10
    for name, tensor in course().items():
        assert torch.equal(tensor, whole[name]), name


def test_a_fragment_without_values_works() -> None:
    live = {"empty": torch.empty(0, 3)}
    state = FragmentState(Layout.of({"empty": (0, 3)}), live, error_feedback=True)
    u, finite = state.boundary(live, 1.0, 1.0)
    assert finite
    assert u.numel() == 0
    state.committed(u, u, (0, u))
    state.land(live, u, PLAIN)
    assert state.digest() == FragmentState(state.layout, live, error_feedback=False).digest()


def test_a_run_begins_with_a_momentum_as_it_keeps_it() -> None:
    taken = {name: tensor / 3 for name, tensor in live_of(5).items()}
    for dtype in (torch.float32, torch.bfloat16):
        state = FragmentState(LAYOUT, live_of(1), error_feedback=False, momentum_dtype=dtype)
        state.take_momentum(taken)
        assert state.momentum.dtype == dtype
        assert torch.equal(state.momentum, LAYOUT.pack(taken).to(dtype))
