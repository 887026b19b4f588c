"""The loss in parts of a micro-batch: the same to the bit, in less memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from dilocox.inner import loss

pytestmark = pytest.mark.waits


def plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def problem(
    rows: int, length: int, vocabulary: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = (3 * torch.randn(rows, length, vocabulary, generator=generator)).to(dtype)
    return logits, torch.randint(vocabulary, (rows, length), generator=generator)


def both(function: object, logits: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    own = logits.clone().requires_grad_()
    value = function(own, labels)  # type: ignore[operator]
    (value / 3).backward()
    assert own.grad is not None
    return [value.detach(), own.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 1000, 70_000])
def test_in_parts_it_is_the_same_to_the_bit(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = problem(3, 67, 351, dtype)
    expected = both(plain, logits, labels)
    monkeypatch.setattr(loss, "AT_ONCE", at_once)
    for found, right in zip(both(loss.mean_cross_entropy, logits, labels), expected, strict=True):
        assert found.dtype == right.dtype
        assert torch.equal(found, right)


def test_labels_that_are_left_out_are_left_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = problem(2, 50, 40, torch.float32)
    labels[:, ::3] = -100
    expected = both(plain, logits, labels)
    monkeypatch.setattr(loss, "AT_ONCE", 400)
    for found, right in zip(both(loss.mean_cross_entropy, logits, labels), expected, strict=True):
        assert torch.equal(found, right)


def peak(logits: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Most bytes beside labels and columns that live during loss and backward pass, with logits.

    By the allocator's own account. The logits are let go as the engine does after the loss.
    """
    given = logits.nbytes
    own: torch.Tensor | None = logits
    start = torch.ones((), requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        own = logits * start  # what the head puts out; its backward pass needs no logits
        value = loss_of(own)
        own = None
        value.backward()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    assert most >= given
    return most


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(4096, torch.float32), (4096, torch.bfloat16), (1000, torch.float32)]
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_it_needs_the_memory_that_is_counted(
    vocabulary: int, dtype: torch.dtype, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = problem(2, 256, vocabulary, dtype)
    if in_parts:
        monkeypatch.setattr(loss, "AT_ONCE", 32 * vocabulary)
    counted = loss.loss_bytes(logits.numel(), dtype.itemsize)
    measured = peak(logits, lambda own: loss.mean_cross_entropy(own, labels))
    assert measured == pytest.approx(counted, rel=0.005)
