"""Preference training's loss holds the memory that is counted for it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dilocox.inner import loss, preference
from dilocox.inner.preference import dpo_loss, pair_loss_bytes
from tests.inner.test_loss import problem
from tests.support.counted_cases import pairs

pytestmark = pytest.mark.waits


def peak(logits: torch.Tensor, labels: torch.Tensor, columns: dict[str, torch.Tensor]) -> int:
    """Most bytes beside the labels and columns that live during loss and backward pass.

    The logits are let go as the engine does after the loss.
    """
    function = functools.partial(dpo_loss, beta=0.1, label_smoothing=0.0)
    own: torch.Tensor | None = logits
    start = torch.ones((), requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        own = logits * start  # what the head puts out; its backward pass needs no logits
        value, _ = function(own, labels, columns)
        own = None
        value.backward()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("vocabulary", "length", "dtype"),
    [
        (4096, 256, torch.float32),
        (4096, 256, torch.bfloat16),
        (2048, 512, torch.bfloat16),
        (64, 2048, torch.float32),
    ],
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_it_needs_the_memory_that_is_counted(
    vocabulary: int,
    length: int,
    dtype: torch.dtype,
    in_parts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, labels = problem(2, length, vocabulary, dtype)
    labels, _, columns = pairs(labels, 3)
    if in_parts:
        monkeypatch.setattr(loss, "AT_ONCE", 32 * vocabulary)
        monkeypatch.setattr(preference, "AT_ONCE", 32 * vocabulary)
    counted = pair_loss_bytes(2, length, vocabulary, dtype.itemsize)
    measured = peak(logits, labels, columns)
    assert measured == pytest.approx(counted, rel=0.005)
