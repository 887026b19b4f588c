"""Low rank as an algorithm: what PowerSGD does, warm starts, error feedback, effective rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as oracle

from dilocox.compression.lowrank.codec import LowRank, effective_ranks
from dilocox.compression.lowrank.layout import Arrangement
from dilocox.compression.lowrank.quantised_factors import decode_basis
from tests.support.lowrank_cases import (
    INT4,
    SHAPES,
    draw,
    exchange,
    factors,
    flat_of,
    geometry_of,
    spectrum,
    views,
    views_of_warm,
)


def test_zero_and_deficient_matrices_are_safe() -> None:
    geometry = geometry_of((160, 300), (64, 96), (64, 96), (128,))
    low = LowRank(geometry, 8)
    u = torch.zeros(geometry.length)
    warm = low.first_warm()
    basis, payloads, decoded = exchange(low, [u, u], warm)
    assert not decoded[0].any()
    assert not payloads[0][32 : 32 + 3 * 8].any()
    left = Arrangement.of(geometry, 8, INT4)
    stacks = [group.left for group in left.groups]
    assert decode_basis(basis, stacks, left.left_length).isfinite().all()
    # Nothing was learned, so the warm start stays, and finds what comes up later.
    after = low.next_warm(payloads, [1.0, 1.0], basis, warm, 1)
    assert torch.equal(views_of_warm(low, after)[0], views_of_warm(low, warm)[0])
    assert low.effective_rank(payloads, basis) == 0.0
    views(geometry, u)[1].copy_(spectrum(64, 96, [3.0, 2.0], 3))
    basis, payloads, decoded = exchange(low, [u], after)
    assert (decoded[0] - u).norm() < 0.25 * u.norm()
    assert not views(geometry, decoded[0])[0].any()
    basis, payloads, decoded = exchange(low, [u], low.next_warm(payloads, [1.0], basis, after, 8))
    assert (decoded[0] - u).norm() < 0.25 * u.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_together_are_as_each_alone(bits: int) -> None:
    shapes = ((192, 160), (64, 300), (192, 160), (64, 300), (192, 160))
    geometry = geometry_of(*shapes)
    us = [draw(geometry, seed) for seed in (11, 12)]
    low = LowRank(geometry, 5, bits)
    assert len(views_of_warm(low, low.first_warm())) == 2
    warm = low.first_warm()
    basis, payloads, decoded = exchange(low, us, warm)
    after = low.next_warm(payloads, [1.0, 0.5], basis, warm, 1)
    worths = []
    seen = dict.fromkeys(shapes, 0)
    for number, shape in enumerate(shapes):
        alone = LowRank(geometry_of(shape), 5, bits)
        group = 0 if shape == shapes[0] else 1
        own = torch.zeros(alone.warm_length)
        views_of_warm(alone, own)[0][0] = views_of_warm(low, warm)[group][seen[shape]]
        parts = [flat_of(views(geometry, u)[number]) for u in us]
        single_basis, single, single_decoded = exchange(alone, parts, own)
        for whole, part in zip(decoded, single_decoded, strict=True):
            close(views(geometry, whole)[number], views(alone.geometry, part)[0])
        single_after = alone.next_warm(single, [1.0, 0.5], single_basis, own, 1)
        close(
            views_of_warm(low, after)[group][seen[shape]], views_of_warm(alone, single_after)[0][0]
        )
        worths.append((alone.effective_rank(single, single_basis), math.prod(shape)))
        seen[shape] += 1
    mean = sum(a * b for a, b in worths) / sum(b for _, b in worths)
    assert low.effective_rank(payloads, basis) == pytest.approx(mean, rel=1e-3)


def close(a: Tensor, b: Tensor) -> None:
    """Equal but for the few codes that another order of summation can tip."""
    assert (a - b).norm() <= 2e-3 * b.norm()


def test_next_warm_is_the_weighted_mean_in_order() -> None:
    geometry = geometry_of((160, 300))
    low = LowRank(geometry, 8)
    warm = low.first_warm()
    weights = [1.5, 0.75, 1.0]
    basis, payloads, _ = exchange(low, [draw(geometry, seed) for seed in (1, 2, 3)], warm)
    qs = [factors(low, payload, basis)[1].float().T for payload in payloads]
    expected = (qs[0] + qs[1] + qs[2]) / torch.tensor(3.25)
    for count in (1, 7, 9):
        after = low.next_warm(payloads, weights, basis, warm, count)
        assert torch.equal(views_of_warm(low, after)[0][0], expected)
        assert not after.view(8, -1)[:, 300:].any()
    # Every eighth landing the weakest of the eight columns starts afresh, from another seed.
    weakest = int(expected.abs().amax(1).argmin())
    starts = []
    for count in (8, 16):
        after = views_of_warm(low, low.next_warm(payloads, weights, basis, warm, count))[0][0]
        changed = (after != expected).any(1)
        assert changed.tolist() == [number == weakest for number in range(8)]
        starts.append(after[weakest])
    assert not torch.equal(*starts)


def test_refreshed_columns_find_what_a_warm_start_cannot() -> None:
    """A warm start of exact zeros in the new direction: without a refresh it stays out of reach."""
    low = LowRank(geometry_of((128, 256)), 1, bits=8)
    old, new = torch.zeros(128, 256), torch.zeros(128, 256)
    old[0, :128] = 1
    new[1, 128:] = 10
    warm = torch.zeros(low.warm_length)
    warm[:128] = 1
    before = []
    for count in range(1, 11):
        basis, payloads, decoded = exchange(low, [flat_of(old + new)], warm)
        warm = low.next_warm(payloads, [1.0], basis, warm, count)
        before.append(float((decoded[0] - flat_of(new)).norm() / new.norm()) < 0.05)
    # Landing 8 gives the seeded column; exchanges 9 and 10 have the new direction.
    assert before == [False] * 8 + [True] * 2


def test_first_warm_is_whole_numbers_and_the_same_anywhere() -> None:
    low = LowRank(geometry_of((160, 300), (64, 96)), 8)
    warm = low.first_warm()
    assert torch.equal(warm, low.first_warm())
    assert ((warm.abs() % 2 == 1) & (warm.abs() < 1 << 16)).all()
    assert abs(float(warm.mean())) < 3000
    digest = hashlib.sha256(warm.numpy().data).hexdigest()
    assert digest == "06ab4bbdd54f0d10f462171a45e81f0a69a0427c9fe90c10f6a8ea0c23bca780"


def test_fitting_keeps_the_strongest_columns() -> None:
    geometry = geometry_of((160, 300), (64, 96), (64, 96))
    many, few = LowRank(geometry, 20), LowRank(geometry, 3)
    assert (many.matrices, few.matrices) == (1, 3)
    warm = many.first_warm()
    columns = views_of_warm(many, warm)[0][0]
    columns[[3, 8, 9]] *= torch.tensor([[16.0], [8.0], [4.0]])
    fewer = views_of_warm(few, few.fit_warm(warm, many))
    assert torch.equal(fewer[0][0], columns[[3, 8, 9]])
    assert torch.equal(fewer[1], views_of_warm(few, few.first_warm())[1])
    back = views_of_warm(many, many.fit_warm(few.fit_warm(warm, many), few))[0][0]
    assert torch.equal(back[:3], columns[[3, 8, 9]])
    assert torch.equal(back[3:], views_of_warm(many, many.first_warm())[0][0][3:])


@pytest.mark.parametrize(("bits", "slack"), [(4, 0.03), (8, 0.002)])
def test_power_iteration_converges_to_the_best_approximation(bits: int, slack: float) -> None:
    values = [0.8**number for number in range(60)]
    matrix = spectrum(192, 320, values, 5)
    low = LowRank(geometry_of((192, 320)), 6, bits)
    warm = low.first_warm()
    misses = []
    for count in range(1, 25):
        basis, payloads, _ = exchange(low, [flat_of(matrix)], warm)
        p = torch.linalg.qr(factors(low, payloads[0], basis)[0]).Q
        misses.append(float((matrix - p @ (p.T @ matrix)).square().sum()))
        warm = low.next_warm(payloads, [1.0], basis, warm, count)
    best = sum(value**2 for value in values[6:])
    energy = sum(value**2 for value in values)
    assert min(misses[4:]) >= best * 0.999
    # The fifth to eighth exchange are before any refresh. After it, a column starts anew: it costs
    # no more than its own share, and less each time.
    assert max(misses[4:8]) <= best + slack * energy
    assert max(misses[8:]) <= best + slack * energy + values[5] ** 2
    assert misses[15] < misses[8]
    assert misses[0] > best + 2 * slack * energy


@pytest.mark.parametrize(("bits", "beta"), [(4, 1.0), (8, 1.0), (4, 0.95)])
def test_error_feedback_identity_over_many_rounds(bits: int, beta: float) -> None:
    """What was sent is what was given less what is withheld, for each site and for the sum."""
    geometry = geometry_of(*SHAPES)
    low = LowRank(geometry, 4, bits)
    warm = low.first_warm()
    residuals = [torch.zeros(geometry.length) for _ in range(3)]
    given_, sent_ = torch.zeros(geometry.length).double(), torch.zeros(geometry.length).double()
    kept = torch.zeros(geometry.length).double()
    constant = draw(geometry, 50)
    for count in range(1, 31):
        us = []
        for site, residual in enumerate(residuals):
            delta = constant + draw(geometry, 100 * count + site, 0.3)
            given_ += delta
            kept += (1 - beta) * residual
            us.append(delta + beta * residual)
        basis, payloads, decoded = exchange(low, us, warm)
        residuals = [u - each for u, each in zip(us, decoded, strict=True)]
        sent_ += sum(each.double() for each in decoded)
        warm = low.next_warm(payloads, [1.0, 1.0, 1.0], basis, warm, count)
    withheld = torch.stack(residuals).double().sum(0)
    assert (given_ - kept - withheld - sent_).norm() <= 1e-5 * given_.norm()
    # It is bounded: rank 4 of 160 catches up with a constant gradient.
    assert withheld.norm() < 0.9 * given_.norm()


def reference(u: Tensor, warm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PowerSGD without quantisation, float64: approximation, P and next Q."""
    p = torch.linalg.qr(u @ warm).Q
    q = u.T @ p
    return p @ q.T, p, q


@pytest.fixture
def single_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_as_powersgd_hook_but_for_quantisation(single_process: None) -> None:
    """PyTorch's hook, the reference above and the codec, warm start and error feedback in each."""
    rows, columns, rank = 160, 256, 4
    module = torch.nn.Linear(columns, rows, bias=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    state = oracle.PowerSGDState(
        None, rank, start_powerSGD_iter=2, min_compression_rate=1, orthogonalization_epsilon=0
    )
    wrapped.register_comm_hook(state, oracle.powerSGD_hook)

    def hooked(gradient: Tensor) -> Tensor:
        module.weight.grad = None
        (wrapped(torch.eye(columns)) * gradient.T).sum().backward()
        assert module.weight.grad is not None
        return module.weight.grad

    generator = torch.Generator().manual_seed(6)
    constant = spectrum(rows, columns, [0.7**number for number in range(20)], 7).float()

    def gradient() -> Tensor:
        return constant + torch.randn(rows, columns, generator=generator) * 0.003

    for _ in range(3):  # Two rounds go uncompressed; the third draws a first Q.
        hooked(gradient())
    low = LowRank(geometry_of((rows, columns)), rank, bits=8)
    ours = torch.zeros(low.warm_length)
    theirs = state.q_memory_dict[0].view(columns, rank)
    views_of_warm(low, ours)[0][0] = theirs.T
    q = theirs.double()
    residual = state.error_dict[0].view(rows, columns).double()
    our_residual = residual.float()
    for count in range(1, 8):
        given_ = gradient()
        found = hooked(given_)
        u = given_.double() + residual
        expected, p, q_next = reference(u, q)
        assert (found - expected).norm() <= 1e-4 * expected.norm()
        # The codec on the reference's own input: its basis is within the factor's noise ...
        flat = flat_of(u)
        own = torch.zeros(low.warm_length)
        views_of_warm(low, own)[0][0] = q.T.float()
        basis, payloads, decoded = exchange(low, [flat], own)
        our_p, _ = factors(low, payloads[0], basis)
        scaled = u @ (q / q.abs().amax(0))
        noise = 0.51 * (scaled.abs().amax(0) / 127) * rows**0.5
        angle = torch.linalg.matrix_norm(our_p - p @ (p.T @ our_p), 2)
        gap = torch.linalg.svdvals(scaled)[-1]
        assert angle <= noise.norm() / (gap - noise.norm()) + 0.02
        # ... and with that basis it sends U^T P within half a step.
        exact = our_p @ (u.T @ our_p).T
        bound = our_p.abs().sum(1).max() * 0.51 * float((u.T @ our_p).abs().max()) / 127
        assert (decoded[0].view(rows, columns) - exact).abs().max() <= bound
        # Over the rounds, each on its own state, they stay together.
        u_ours = given_ + our_residual
        basis, payloads, decoded = exchange(low, [flat_of(u_ours)], ours)
        ours = low.next_warm(payloads, [1.0], basis, ours, count)
        our_residual = u_ours - decoded[0].view(rows, columns)
        assert (decoded[0].view(rows, columns) - expected).norm() <= 0.05 * expected.norm()
        residual, q = u - expected, q_next


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("equal", [2, 8, 30])
def test_effective_rank_of_equal_singular_values_is_their_number(bits: int, equal: int) -> None:
    low = LowRank(geometry_of((256, 384)), 8, bits)
    u = flat_of(spectrum(256, 384, [2.5] * equal, 8))
    warm = low.first_warm()
    for count in range(1, 4):
        basis, payloads, _ = exchange(low, [u], warm)
        warm = low.next_warm(payloads, [1.0], basis, warm, count)
    assert low.effective_rank(payloads, basis) == pytest.approx(equal, rel=0.05)


@pytest.mark.parametrize("decay", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("rank", [4, 8, 16])
def test_effective_rank_follows_the_spectrum(decay: float, rank: int) -> None:
    """Against SVD: the energy that is missed, and the number that follows from what is known."""
    matrix = spectrum(256, 384, [decay**number for number in range(100)], 9)
    exact = torch.linalg.svdvals(matrix).square()
    truth = float(exact.sum() ** 2 / exact.square().sum())
    most = exact[:rank].square().sum() + exact[rank:].sum() * exact[rank - 1]
    known = float(exact.sum() ** 2 / most)
    low = LowRank(geometry_of((256, 384)), rank)
    warm = low.first_warm()
    for count in range(1, 8):
        basis, payloads, _ = exchange(low, [flat_of(matrix)], warm)
        missed = float(payloads[0][32:40].clone().view(torch.float64))
        p = torch.linalg.qr(factors(low, payloads[0], basis)[0]).Q
        inside = float((p.T @ matrix).square().sum())
        # P's 8 bits make its columns' lengths inexact by some thousandths.
        energy = float(exact.sum())
        assert missed == pytest.approx(energy - inside, abs=8e-3 * energy)
        warm = low.next_warm(payloads, [1.0], basis, warm, count)
    assert known <= truth * (1 + 1e-9)
    assert low.effective_rank(payloads, basis) == pytest.approx(known, rel=0.08)


def test_effective_ranks_from_core_and_missed_energy() -> None:
    """Squared singular values 4, 2 within the basis; of what is missed, as few as there can be."""
    core = torch.diag(torch.tensor([4.0, 2.0], dtype=torch.float64)).expand(4, 2, 2).clone()
    core[3] = 0
    missed = torch.tensor([0.0, 1.0, 100.0, 0.0], dtype=torch.float64)
    # Nothing, one of 1, and ten of 10 as there are no more than ten; nothing at all.
    expected = torch.tensor([36 / 20, 49 / 21, 106**2 / 1020, 0.0], dtype=torch.float64)
    assert torch.allclose(effective_ranks(core, missed, 10), expected, rtol=1e-12)
    expected[2] = 106**2 / (20 + 50 * 2**2)
    assert torch.allclose(effective_ranks(core, missed, 60), expected, rtol=1e-12)


def test_effective_rank_is_of_the_mean_not_of_the_sites() -> None:
    common = spectrum(256, 384, [3.0] * 4, 10)
    apart = [spectrum(256, 384, [3.0] * 4, seed) for seed in (11, 12, 13, 14)]
    low = LowRank(geometry_of((256, 384)), 24, bits=8)

    def found(matrices: list[Tensor], low: LowRank = low) -> float:
        us = [flat_of(matrix) for matrix in matrices]
        warm = low.first_warm()
        for count in range(1, 4):
            basis, payloads, _ = exchange(low, us, warm)
            warm = low.next_warm(payloads, [1.0] * len(us), basis, warm, count)
        return low.effective_rank(payloads, basis)

    assert found([common, common, common]) == pytest.approx(4, rel=0.03)
    assert found([common, common, -common]) == pytest.approx(4, rel=0.03)
    assert found(apart) == pytest.approx(16, rel=0.15)
    # What the mean misses is as much less, or as little, as what it has of the single sites'.
    narrow = LowRank(low.geometry, 8, bits=8)
    wide = spectrum(256, 384, [3.0] * 20, 15)
    assert found([wide] * 3, narrow) == pytest.approx(20, rel=0.03)
    assert found([wide, wide, -wide], narrow) == pytest.approx(20, rel=0.03)
    small = LowRank(geometry_of((128,)), 4)
    basis, payloads, _ = exchange(small, [torch.ones(128)], small.first_warm())
    assert small.effective_rank(payloads, basis) is None  # there is no matrix
    assert small.low_rank_values == 0
