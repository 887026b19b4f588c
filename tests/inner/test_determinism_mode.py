"""Operations without a deterministic kernel: heard of at the start, and then no rank is strict."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilocox.inner import SiteMesh, determinism_mode, mean_cross_entropy, set_determinism
from dilocox.inner.attention import sdpa_backends, set_sdpa_backends
from dilocox.inner.determinism_mode import (
    operations_that_warn,
    refused_operation,
    settle_determinism,
)
from dilocox.training import builder
from dilocox.training.builder import Hooks, ModelPlan, RankParts, RankPlace, RankWiring, build_rank
from dilocox.training.determinism_class import facts_here
from tests.support.neighbours import run_config

pytestmark = pytest.mark.waits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_NVLS_ENABLE",
    "NCCL_ALGO",
    "FLASH_ATTENTION_DETERMINISTIC",
)


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process's settings are put back."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    backends = [each for each in SDPBackend.__members__.values() if each is not SDPBackend.ERROR]
    with sdpa_kernel(backends, set_priority=True):
        yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism_mode, "lacks_kernels", lambda device: True)


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


def test_what_a_gpu_is_asked_for() -> None:
    set_determinism(True, CUDA)
    asked = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"}
    assert settings() == asked
    set_determinism(True, CUDA, "flash_attention_2")
    assert settings() == {**asked, "FLASH_ATTENTION_DETERMINISTIC": "1"}


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    set_determinism(True, CUDA)
    assert settings()["NCCL_ALGO"] == "Tree"


@pytest.mark.parametrize(("deterministic", "device"), [(False, CUDA), (True, CPU)])
def test_nothing_is_set_that_nobody_needs(deterministic: bool, device: torch.device) -> None:
    set_determinism(deterministic, device, "flash_attention_2")
    assert settings() == {}


def write() -> None:
    """An operation that PyTorch has no deterministic kernel of, on processors either."""
    torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))


def test_operations_are_named_and_other_warnings_passed_on() -> None:
    def call() -> None:
        write()
        warnings.warn("a plain one", UserWarning, stacklevel=1)
        # True in the warning mode alone, which this pass is run in.
        flash = "Flash Attention defaults to a non-deterministic algorithm. To"
        warnings.warn(flash, UserWarning, stacklevel=1)
        write()

    set_determinism(True, CPU)
    with pytest.warns(UserWarning, match="a plain one") as others:
        assert operations_that_warn(call) == ["put_"]
    assert len(others) == 1


def test_what_is_no_such_operation() -> None:
    # What attention says in the warning mode: in the strict mode it takes another kernel.
    assert (
        refused_operation("Flash Attention defaults to a non-deterministic algorithm. To") is None
    )
    assert refused_operation("cumsum_cuda_kernel does not have a deterministic implementation, but"
                             " you set") == "cumsum_cuda_kernel"  # fmt: skip
    said = refused_operation("Deterministic behavior was enabled with either `torch.use_determ")
    assert said == "cuBLAS with this CUBLAS_WORKSPACE_CONFIG"


class TwoRanks:
    """The mesh of a site whose other rank has heard `theirs`."""

    def __init__(self, *theirs: str) -> None:
        self.device, self._theirs = CUDA, list(theirs)

    def gather_names(self, names: list[str]) -> list[list[str]]:
        return [names, self._theirs]


def strict() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def test_all_ranks_of_a_site_agree() -> None:
    set_determinism(True, CUDA)
    mesh: Any = TwoRanks()
    assert settle_determinism(mesh, lambda: None) == ()
    assert strict()
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        write()
    set_determinism(True, CUDA)
    mesh = TwoRanks("index_add_cuda_")
    assert settle_determinism(mesh, write) == ("index_add_cuda_", "put_")
    assert not torch.are_deterministic_algorithms_enabled()
    write()


def test_nobody_listens_in_vain() -> None:
    def never() -> None:
        raise AssertionError("a training pass was run")

    set_determinism(True, CPU)
    assert settle_determinism(SiteMesh.create(1, 1, CPU), never) == ()
    assert not strict(), "operations that warn on a processor compute the same bits"
    set_determinism(False, CUDA)
    mesh: Any = TwoRanks()
    assert settle_determinism(mesh, never) == ()


class Written(torch.autograd.Function):
    """Passes on; the backward pass has an operation without a deterministic kernel."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        write()
        return gradient


def loss_that_writes(logits: Tensor, labels: Tensor) -> Tensor:
    passed: Tensor = Written.apply(logits)
    return mean_cross_entropy(passed, labels)


def built(tmp_path: Path, hooks: Hooks) -> tuple[RankParts, dict[str, Any]]:
    config = run_config(tmp_path, "run")
    rank = build_rank(
        config, ModelPlan.of(config, 270), RankPlace("paris", 0, 0), hooks,
        RankWiring(store=None, local_rank=0, ranks_here=1, timeout=60.0),
    )  # fmt: skip
    return rank, facts_here(config, CPU)


def step(rank: RankParts) -> float:
    tokens = torch.arange(4 * 33).reshape(4, 33) % 270
    return rank.model.inner_step(tokens[:, :-1], tokens[:, 1:], 1e-3).loss


def test_a_model_with_such_an_operation_trains_and_says_so(
    tmp_path: Path, as_on_a_gpu: None
) -> None:
    random = torch.get_rng_state()
    rank, facts = built(tmp_path, Hooks(loss=loss_that_writes))
    assert rank.not_deterministic == ("put_",)
    assert facts["deterministic"] is False
    assert step(rank) > 0.0
    strict_rank, facts = built(tmp_path, Hooks())
    assert strict_rank.not_deterministic == ()
    assert facts["deterministic"] is True
    assert strict()
    # The passes have trained nothing, and drawn nothing.
    assert torch.equal(torch.get_rng_state(), random)
    assert step(strict_rank) == step(built(tmp_path, Hooks(loss=loss_that_writes))[0])


@pytest.mark.parametrize("deterministic", [True, False])
def test_attention_backends_follow_the_mode_that_is_taken(
    deterministic: bool, tmp_path: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        builder, "set_sdpa_backends", lambda attention, *_: set_sdpa_backends(attention, 128, CUDA)
    )
    tried: list[tuple[str, ...]] = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        tried.append(sdpa_backends())
        return (mean_cross_entropy if deterministic else loss_that_writes)(logits, labels)

    rank, _ = built(tmp_path, Hooks(loss=loss))
    assert "cudnn_attention" not in tried[-1], "the pass at the start runs what training may run"
    step(rank)
    assert (tried[-1][0] == "cudnn_attention") is not deterministic
