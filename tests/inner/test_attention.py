"""The attention backends that a rank on a GPU tries, and their order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilocox.inner.attention import sdpa_backends, set_sdpa_backends
from dilocox.utils import torch_internals

pytestmark = pytest.mark.waits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DETERMINISTIC = ("flash_attention", "efficient_attention", "math")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """This process's settings are put back. PyTorch has them in builds for CPUs, too."""
    everything = list(SDPBackend.__members__.values())
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    own = [each for each in everything if each is not SDPBackend.ERROR]
    with sdpa_kernel(own, set_priority=True):
        torch.use_deterministic_algorithms(False)
        yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def scramble() -> tuple[str, ...]:
    """Settings that nobody wants: two backends off, and an order of its own."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch_internals.set_sdpa_priority(sorted(torch_internals.sdpa_priority()))
    return sdpa_backends()


def test_a_gpu_tries_cudnn_first() -> None:
    assert scramble() == ("math", "efficient_attention")
    set_sdpa_backends("sdpa", 4096, CUDA)
    assert sdpa_backends() == ("cudnn_attention", *DETERMINISTIC)
    order = torch_internals.sdpa_priority()
    assert len(order) == len(set(order)), "each backend is there once"
    assert SDPBackend.OVERRIDEABLE.value in order


@pytest.mark.parametrize("warn_only", [True, False])
def test_a_deterministic_rank_never_tries_cudnn(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    set_sdpa_backends("sdpa", 4096, CUDA)
    assert sdpa_backends() == DETERMINISTIC
    # PyTorch writes this order at the first attention on a recent GPU: it changes nothing.
    torch_internals.set_sdpa_priority([SDPBackend.CUDNN_ATTENTION.value,
        SDPBackend.FLASH_ATTENTION.value, SDPBackend.EFFICIENT_ATTENTION.value,
        SDPBackend.MATH.value])  # fmt: skip
    assert sdpa_backends() == DETERMINISTIC


@pytest.mark.parametrize("length", [64, 4160, 4097])
def test_cudnn_is_left_out_for_lengths_that_it_computes_wrongly(length: int) -> None:
    set_sdpa_backends("sdpa", length, CUDA)
    assert sdpa_backends() == DETERMINISTIC


@pytest.mark.parametrize(
    ("attention", "device"), [("sdpa", CPU), ("eager", CUDA), ("flash_attention_2", CUDA)]
)
def test_nothing_is_set_that_nobody_needs(attention: str, device: torch.device) -> None:
    before = scramble(), torch_internals.sdpa_priority()
    set_sdpa_backends(attention, 4096, device)
    assert (sdpa_backends(), torch_internals.sdpa_priority()) == before
