"""Muon against PyTorch's, against its formulas in float64, and over rows of sharded matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dilocox.config.site import InnerSection
from dilocox.errors import CheckpointError
from dilocox.inner import mean_cross_entropy, muon
from dilocox.inner.muon import orthonormalise, update_scale
from dilocox.inner.optimizer import InnerOptimizer, is_hidden_matrix
from tests.support import site_cases, toy_model
from tests.support.worker_pool import Pool

pytestmark = pytest.mark.waits

INNER = InnerSection(optimizer="muon", weight_decay=0.3, momentum=0.8)
GO, SKIP, ONE = torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0)
SHAPES = {
    "model.embed_tokens.weight": (12, 6),
    "model.layers.0.norm.weight": (6,),
    "model.layers.0.up.weight": (10, 6),
    "model.layers.0.down.weight": (6, 10),
    "model.layers.0.experts": (2, 3, 6),
    "model.layers.1.up.weight": (10, 6),
    "model.norm.weight": (6,),
    "lm_head.weight": (12, 6),
}
MATRICES = [name for name in SHAPES if name.endswith(("up.weight", "down.weight"))]


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(toy_model.value(name, shape)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    return {name: toy_model.value(f"{name} {step}", shape) for name, shape in SHAPES.items()}


def take_step(
    optimizer: InnerOptimizer,
    held: Mapping[str, nn.Parameter],
    step: int,
    divisor: Tensor = ONE,
    skip: Tensor = GO,
) -> None:
    for name, gradient in gradients(step).items():
        held[name].grad = gradient
    optimizer.step(0.02 / (step + 1), divisor, skip)


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(left[name].detach().numpy().view(np.uint32), value.view(np.uint32))
        for name, value in ((key, right[key].detach().numpy()) for key in right)
    )


def test_which_tensors_are_hidden_matrices() -> None:
    assert [name for name, shape in SHAPES.items() if is_hidden_matrix(name, shape)] == MATRICES
    assert is_hidden_matrix("transformer.h.11.attn.c_attn.weight", (4, 4))
    assert not is_hidden_matrix("transformer.wpe.weight", (4, 4))


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3), (1, 5)])
def test_orthonormalise_changes_singular_values_only(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    matrices = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    wanted = values / matrices.square().sum((-2, -1), keepdim=True).sqrt()[:, 0]
    for _ in range(5):
        wanted = 3.4445 * wanted - 4.7750 * wanted**3 + 2.0315 * wanted**5
    found = orthonormalise(matrices)
    torch.testing.assert_close(found, left @ torch.diag_embed(wanted) @ right)
    # The iteration is made for singular values down to a hundredth of the norm.
    assert float(values.min() / values.max()) > 0.01
    assert float(wanted.min()) > 0.65
    assert float(wanted.max()) < 1.25


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    power=st.integers(-10, 10),
)
def test_orthonormalise_knows_neither_scale_nor_orientation(
    rows: int, columns: int, seed: int, power: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    found = orthonormalise(matrices)
    torch.testing.assert_close(orthonormalise(matrices * 2.0**power), found)
    torch.testing.assert_close(orthonormalise(matrices.mT), found.mT)
    torch.testing.assert_close(orthonormalise(matrices[1:]), found[1:])


def test_zeros_stay_zero() -> None:
    assert not orthonormalise(torch.zeros(2, 3, 5)).any()


def test_equals_the_optimizers_of_pytorch() -> None:
    held, theirs = parameters(), parameters()
    optimizer = InnerOptimizer(held, INNER, precision=torch.bfloat16)
    vectors = [name for name, shape in SHAPES.items() if len(shape) == 1]
    rest = [name for name in SHAPES if name not in MATRICES and name not in vectors]
    groups = [
        {"params": [theirs[name] for name in rest], "weight_decay": 0.3},
        {"params": [theirs[name] for name in vectors], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=INNER.betas, eps=INNER.eps)
    matrices = torch.optim.Muon(
        [theirs[name] for name in MATRICES],
        weight_decay=0.3,
        momentum=0.8,
        adjust_lr_fn="match_rms_adamw",
    )
    moved = 0.0
    for step in range(5):
        take_step(optimizer, held, step, torch.tensor(2.0))
        for name, gradient in gradients(step).items():
            theirs[name].grad = gradient / 2.0
        for one in (adamw, matrices):
            for group in one.param_groups:
                group["lr"] = 0.02 / (step + 1)
            one.step()
        moved += 0.02 / (step + 1) * update_scale(10, 6)
    for name in SHAPES:
        # Orthonormal updates in bf16 may differ in their last bit between kernels.
        atol = moved * 2**-8 if name in MATRICES else 1e-6
        torch.testing.assert_close(held[name], theirs[name], atol=atol, rtol=1e-6)


def test_equals_the_formulas_in_float64() -> None:
    held = parameters()
    optimizer = InnerOptimizer(held, INNER)
    wanted = {name: held[name].detach().double() for name in MATRICES}
    momentum = {name: torch.zeros_like(value) for name, value in wanted.items()}
    for step in range(4):
        take_step(optimizer, held, step, torch.tensor(1.0 + step))
        rate = 0.02 / (step + 1)
        for name in MATRICES:
            gradient = gradients(step)[name].double() / (1.0 + step)
            momentum[name] = 0.8 * momentum[name] + 0.2 * gradient
            update = orthonormalise((0.8 * momentum[name] + 0.2 * gradient).unsqueeze(0))[0]
            wanted[name] *= 1 - rate * 0.3
            wanted[name] -= rate * 0.2 * math.sqrt(10) * update
    for name, value in wanted.items():
        torch.testing.assert_close(held[name].detach().double(), value, atol=1e-6, rtol=0)


def test_matrices_may_have_a_rate_of_their_own() -> None:
    slow, fast = parameters(), parameters()
    rates = InnerSection(optimizer="muon", learning_rate=0.02, muon_learning_rate=0.08)
    take_step(InnerOptimizer(slow, InnerSection(optimizer="muon", learning_rate=0.02)), slow, 0)
    take_step(InnerOptimizer(fast, rates), fast, 0)
    for name, start in parameters().items():
        moved = (fast[name] - start) / (4 if name in MATRICES else 1)
        torch.testing.assert_close(moved, slow[name] - start, atol=1e-6, rtol=0)


def test_batches_do_not_change_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (1, 2**25):
        monkeypatch.setattr(muon, "_BATCH_ELEMENTS", elements)
        held = parameters()
        optimizer = InnerOptimizer(held, INNER)
        for step in range(3):
            take_step(optimizer, held, step)
        results.append((held, optimizer.state()))
    for one, other in zip(*results, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_skipped_step_changes_no_bit(bad: float) -> None:
    through, held = parameters(), parameters()
    unskipped, optimizer = InnerOptimizer(through, INNER), InnerOptimizer(held, INNER)
    take_step(unskipped, through, 0)
    take_step(optimizer, held, 0)
    for parameter in held.values():
        parameter.grad = torch.full_like(parameter, bad)
    optimizer.step(0.1, torch.tensor(bad), SKIP)
    assert same_bits(held, through)
    assert same_bits(optimizer.state(), unskipped.state())
    take_step(unskipped, through, 1)
    take_step(optimizer, held, 1)
    assert same_bits(held, through)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skip", [False, True])
def test_matrices_are_updated_together_as_one_by_one(dtype: torch.dtype, skip: bool) -> None:
    """To the bit what parameter - rate * decay * parameter - rate * update is, written out."""
    shape, rate, decay = (7, 5), 0.037, 0.0123
    own = [nn.Parameter(toy_model.value(f"own {n}", shape)) for n in range(3)]
    with torch.no_grad():
        own[0][0, 0], own[0][0, 1] = -0.0, 0.0
    update = torch.stack([toy_model.value(f"update {n}", shape).T for n in range(3)]).mT.to(dtype)
    skipped = torch.tensor(skip)
    wanted = []
    with torch.no_grad():
        for parameter, each in zip(own, update, strict=True):
            fresh = parameter * (1 - decay)
            fresh.add_(each, alpha=-rate)
            wanted.append(torch.where(skipped, parameter, fresh))
        if skip:
            update[1] = math.nan
        kept = torch.where(skipped, 1.0, 1 - decay)
        muon._update(own, update.masked_fill_(skipped, 0.0), kept, rate)
    for parameter, each in zip(own, wanted, strict=True):
        assert torch.equal(parameter.view(torch.int32), each.view(torch.int32))


def test_state_goes_on_bit_for_bit() -> None:
    through = parameters()
    optimizer = InnerOptimizer(through, INNER)
    for step in range(2):
        take_step(optimizer, through, step)
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert {key for key in state if key.startswith("momentum/")} == {
        f"momentum/{name}" for name in MATRICES
    }
    assert all(state[f"momentum/{name}"].shape == SHAPES[name] for name in MATRICES)
    held = {name: nn.Parameter(p.detach().clone()) for name, p in through.items()}
    later = InnerOptimizer(held, INNER)
    later.load(state)
    for one, mine in ((optimizer, through), (later, held)):
        take_step(one, mine, 2)
    assert same_bits(held, through)
    assert same_bits(later.state(), optimizer.state())


def test_state_of_adamw_is_refused() -> None:
    other = InnerOptimizer(parameters(), InnerSection()).state()
    with pytest.raises(CheckpointError, match="is missing or unexpected"):
        InnerOptimizer(parameters(), INNER).load(other)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sharded_matrices_are_updated_as_whole_ones(pool: Pool, ranks: int) -> None:
    (single,) = pool.run(1, "tests.support.site_cases", "muon_over_shards")
    parts = pool.run(ranks, "tests.support.site_cases", "muon_over_shards")
    # More ranks than rows: some hold none of a matrix.
    assert any(part["model.layers.0.gate"].shape[0] == 0 for part in parts)
    for name, wanted in single.items():
        found = np.concatenate([part[name] for part in parts])
        np.testing.assert_allclose(found, wanted, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 3), (3, 8), (5, 2), (8, 4)])
def test_matrices_are_shared_out_and_come_back(pool: Pool, count: int, rows: int) -> None:
    for ranks in (2, 3):
        results = pool.run(ranks, "tests.support.site_cases", "swapped", count=count, rows=rows)
        whole = np.concatenate([result["whole"] for result in results])
        np.testing.assert_array_equal(whole[:count], results[0]["wanted"])
        assert not whole[count:].any()
        assert all(result["back"] for result in results)


LAYOUTS = [(2, 1, "1f1b"), (1, 2, "1f1b"), (1, 3, "1f1b"), (2, 2, "1f1b"), (2, 2, "zbv")]
TRAINED: dict[str, Any] = {
    "inner": InnerSection(optimizer="muon", clip=0.5),
    "rows": 12,
    "tied": True,
}


@pytest.fixture(scope="module")
def single(pool: Pool) -> dict[str, Any]:
    """One rank that holds all."""
    (found,) = pool.run(1, "tests.support.site_cases", "trained", **TRAINED)
    return found


@pytest.mark.parametrize(("stages", "shards", "schedule"), LAYOUTS)
def test_training_is_the_same_in_every_layout(
    pool: Pool, single: dict[str, Any], stages: int, shards: int, schedule: str
) -> None:
    layout = {"stages": stages, "shards": shards, "schedule": schedule}
    results = pool.run(stages * shards, "tests.support.site_cases", "trained", **TRAINED, **layout)
    for name, wanted in single["tensors"].items():
        parts = [r["tensors"][name] for r in results if name in r["tensors"]]
        np.testing.assert_allclose(np.concatenate(parts), wanted, atol=2e-5, err_msg=name)
    for result in results:
        assert result["losses"] == pytest.approx(single["losses"], rel=2e-5)


@pytest.mark.parametrize(("stages", "shards"), [(1, 1), (2, 2)])
def test_a_site_goes_on_bit_for_bit(pool: Pool, stages: int, shards: int) -> None:
    for result in pool.run(
        stages * shards,
        "tests.support.site_cases",
        "resumed",
        stages=stages,
        shards=shards,
        tied=True,
        inner=InnerSection(optimizer="muon"),
    ):
        assert all(result[key] for key in ("tensors", "state", "moved"))
        assert any(key.startswith("momentum/model.layers.") for key in result["keys"])


def test_a_bad_gradient_on_one_shard_skips_all(pool: Pool) -> None:
    for result in pool.run(
        2,
        "tests.support.site_cases",
        "spoiled",
        name="model.layers.3.down.weight",
        place=float("nan"),
        shards=2,
        rows=4,
        inner=InnerSection(optimizer="muon"),
    ):
        assert result["finite"] == (False, True)
        assert result["kept"]
        assert result["moved"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_site_learns(one_thread: None, precision: torch.dtype) -> None:
    model = site_cases.build(
        inner=InnerSection(optimizer="muon"), rows=8, micro=8, precision=precision
    )
    ids, labels = toy_model.batch(8, seed=0)
    losses = [model.inner_step(ids, labels, 0.02).loss for _ in range(30)]
    start = mean_cross_entropy(site_cases.reference_model(False)(ids), labels).item()
    assert losses[0] == pytest.approx(start, rel=0.05)
    assert losses[-1] < 0.5 * losses[0]
