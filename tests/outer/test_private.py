"""Clipping and noise of contributions: the bound holds for every input, the noise has its size."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout
from dilocox.outer.private import (
    PIECE,
    ContributionPrivacy,
    add_noise,
    clip,
    gaussian,
    share_of_bound,
)

pytestmark = pytest.mark.waits

SHAPES = {"a.weight": (5, 7), "a.bias": (0,), "b": (130,)}
LAYOUT = Layout.of(SHAPES)
VALUES = 165


def known(seed: str = "") -> Callable[[int], bytes]:
    """Return a source of bytes that a test can repeat."""
    numbers = itertools.count()
    return lambda count: hashlib.shake_256(f"{seed}/{next(numbers)}".encode()).digest(count)


def live_of(values: Tensor) -> dict[str, Tensor]:
    parts = values.split([math.prod(shape) for shape in SHAPES.values()])
    return {
        name: part.clone().view(shape)
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


def state_of(privacy: ContributionPrivacy, error_feedback: bool = True) -> FragmentState:
    start = live_of(torch.zeros(VALUES))
    return FragmentState(LAYOUT, start, error_feedback=error_feedback, privacy=privacy)


def norm(values: Tensor) -> float:
    return float(values.double().norm())


ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(ANY, min_size=1, max_size=VALUES), st.floats(1e-9, 1e9), st.booleans())
@settings(deadline=None)
def test_no_input_contributes_more_than_the_bound(
    values: list[float], bound: float, error_feedback: bool
) -> None:
    """Values that are not finite, denormal or huge included; what is not finite is dropped."""
    moved = torch.zeros(VALUES)
    moved[: len(values)] = torch.tensor(values)
    state = state_of(ContributionPrivacy(bound, 0.0), error_feedback)
    live = live_of(-moved)
    u, finite = state.boundary(live, 1.0, 1.0)
    assert norm(u) <= bound
    if not finite:
        assert state.non_finite is not None
        assert not u.any()
        assert not LAYOUT.pack(live).any(), "the site goes on from the anchor"
    else:
        plain = LAYOUT.pack(live_of(moved))
        if norm(plain) <= 0.999 * bound:
            assert torch.equal(u, plain), "what is short enough is not changed"
        elif bound > 1e-30:
            assert norm(u) == pytest.approx(bound, rel=1e-5)


def test_what_is_not_finite_is_not_noised() -> None:
    state = state_of(ContributionPrivacy(1.0, 1.0, known()))
    moved = torch.zeros(VALUES)
    moved[40] = math.nan
    u, finite = state.boundary(live_of(moved), 1.0, 1.0)
    assert not finite
    assert not u.any()
    assert state.non_finite == "b[5]"


def test_what_is_clipped_away_never_comes_back() -> None:
    """Over many rounds of a sparse codec with error feedback: all that is sent is what was noised.

    The residual is what was withheld of the noised contributions, and never of the clipped change.
    """
    bound = 0.5
    state = state_of(ContributionPrivacy(bound, 0.0))
    assert state.residual is not None
    live, total = live_of(torch.zeros(VALUES)), torch.zeros(LAYOUT.length)
    rounds = 20
    for number in range(rounds):
        for tensor in live.values():
            tensor.sub_(100.0 + number)
        u, finite = state.boundary(live, 1.0, 1.0)
        assert finite
        part = state.compressor("topk:8").part(0, LAYOUT.length, number)
        sent = part.decode(part.encode(u))
        state.committed(u, sent)
        total += sent
        assert norm(total + state.residual) <= (number + 1) * bound * 1.001
    left_out, finite = state.boundary(live, 1.0, 1.0)
    assert finite
    state.committed(left_out, None)
    assert norm(total + state.residual) <= rounds * bound * 1.001


def test_training_beside_an_exchange_that_went_by_is_lost() -> None:
    state = state_of(ContributionPrivacy(0.5, 0.0))
    assert state.residual is not None
    live = live_of(torch.full((VALUES,), 3.0))
    state.fold_into_residual(live, 1.0)
    assert not state.residual.any()
    u, _ = state.boundary(live, 1.0, 1.0)
    assert not u.any()


def test_weight_and_residual_come_after_the_noise() -> None:
    """The noise has the weight of the contribution that it hides; gaps stay zero."""
    privacy = ContributionPrivacy(1.0, 2.0, known("w"))
    state = state_of(privacy)
    assert state.residual is not None
    before = LAYOUT.pack(live_of(torch.full((VALUES,), 7.0)))
    state.residual.copy_(before)
    u, finite = state.boundary(live_of(torch.zeros(VALUES)), 3.0, 0.5)
    expected = torch.zeros(LAYOUT.length)
    ContributionPrivacy(1.0, 2.0, known("w")).apply(expected, LAYOUT)
    assert finite
    assert torch.equal(u, expected * 3.0 + before * 0.5)
    assert not any(u[gap].any() for gap in LAYOUT.gaps)


def test_overlap_eager_sees_what_was_contributed() -> None:
    live = live_of(torch.zeros(VALUES))
    state = FragmentState(
        LAYOUT, live, error_feedback=False, eager=True,
        privacy=ContributionPrivacy(1.0, 0.5, known("e")),
    )  # fmt: skip
    u, _ = state.boundary(live_of(torch.ones(VALUES)), 1.0, 1.0)
    assert state.previous is not None
    assert torch.equal(u, state.previous)


@given(
    st.lists(st.integers(0, 10**12), min_size=1, max_size=12), st.integers(1, 8),
    st.floats(1e-6, 1e6),
)  # fmt: skip
def test_the_shares_of_all_pieces_are_the_bound(
    pieces: list[int], stages: int, whole: float
) -> None:
    total = max(1, sum(pieces))
    shares = [share_of_bound(whole, values, total, stages) for values in pieces]
    squares = stages * sum(share**2 for share in shares)
    assert squares <= whole**2 * (1 + 1e-9)
    if sum(pieces):
        assert squares == pytest.approx(whole**2)


def test_clipped_norms_hold_where_fp32_rounds() -> None:
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-30, 1.0, 1e11):
        values = torch.randn(300_000, generator=generator) * scale
        bound = norm(values) / 3
        clip(values, bound)
        assert bound * (1 - 2e-6) <= norm(values) <= bound


def test_the_noise_is_gaussian_with_its_deviation() -> None:
    """4,194,304 values: the limits are six standard errors of each estimate."""
    count = 4 * PIECE
    values = torch.zeros(count)
    add_noise(values, 0.25, known("statistics"))
    drawn = values.double().numpy() / 0.25
    error = 1 / math.sqrt(count)
    assert abs(drawn.mean()) < 6 * error
    assert abs(drawn.std() - 1) < 6 * error / math.sqrt(2)
    assert abs((drawn**3).mean()) < 6 * error * math.sqrt(15)
    assert abs((drawn**4).mean() - 3) < 6 * error * math.sqrt(96)
    for at in (1.0, 2.0, 3.0):
        share = math.erfc(at / math.sqrt(2))
        found = float((np.abs(drawn) > at).mean())
        assert abs(found - share) < 6 * math.sqrt(share * (1 - share)) * error
    for lag in (1, 2, PIECE // 2, PIECE):
        assert abs((drawn[lag:] * drawn[:-lag]).mean()) < 6 / math.sqrt(count - lag)


def test_the_noise_comes_from_chacha20_of_a_fresh_key() -> None:
    """Of its stream's first two words; another key of the system gives other noise."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    key = known("k")(32)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(16))
    first, second = np.frombuffer(stream, "<u8")
    radius = math.sqrt(-2 * math.log((int(first) + 1) / 2**64))
    angle = 2 * math.pi * (int(second) + 1) / 2**64
    found = gaussian(2, known("k"))
    assert found.tolist() == pytest.approx([radius * math.cos(angle), radius * math.sin(angle)])
    assert not torch.equal(gaussian(64), gaussian(64))
    assert gaussian(3).shape == (3,)


def test_a_seed_of_torch_does_not_fix_the_noise() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        values = torch.zeros(128)
        ContributionPrivacy(1.0, 1.0).apply(values, Layout.of({"w": (128,)}))
        found.append(values)
    assert not torch.equal(*found)
