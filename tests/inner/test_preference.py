"""Preference training's loss holds the memory that is counted for it."""

from __future__ import annotations

import functools

import pytest
import torch

from dilocox.inner import loss, preference
from dilocox.inner.preference import dpo_loss, pair_loss_bytes
from tests.inner.test_loss import peak, problem
from tests.support.counted_cases import pairs

pytestmark = pytest.mark.waits


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
    function = functools.partial(dpo_loss, beta=0.1, label_smoothing=0.0)
    measured = peak(logits, lambda own: function(own, labels, columns)[0])
    assert measured == pytest.approx(counted, rel=0.005)
