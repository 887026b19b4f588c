"""Targets: labels and columns in one tensor, bit for bit, and losses that read them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.data.columns import targets
from dilocox.inner.columns import (
    ColumnLoss,
    columns_of,
    labels_of,
    plain_targets,
    takes_columns,
    with_labels,
)


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(width=32), min_size=6, max_size=6), names=st.integers(0, 3))
def test_columns_come_back_with_the_same_bits(values: list[float], names: int) -> None:
    labels = np.arange(6, dtype=np.int64).reshape(2, 3)
    given = {
        name: np.roll(np.array(values, dtype=np.float32), number).reshape(2, 3)
        for number, name in enumerate("cab"[:names])
    }
    packed = torch.from_numpy(targets(labels, given or None))
    assert packed.dtype == torch.int64
    assert labels_of(packed).tolist() == labels.tolist()
    found = columns_of(packed, sorted(given))
    for name, column in given.items():
        assert (found[name].numpy().view(np.int32) == column.view(np.int32)).all()
    other = with_labels(packed, labels_of(packed) + 7)
    assert other.shape == packed.shape
    assert labels_of(other).tolist() == (labels + 7).tolist()
    for name, column in columns_of(other, sorted(given)).items():
        assert column.view(torch.int32).equal(found[name].view(torch.int32))


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        columns_of(plain_targets(torch.zeros(2, 3, dtype=torch.int64), 2), ["a"])


def test_an_example_has_one_in_every_column() -> None:
    labels = torch.zeros(2, 3, dtype=torch.int64)
    assert plain_targets(labels, 0) is labels
    found = columns_of(plain_targets(labels, 2), ["a", "b"])
    assert {name: each.tolist() for name, each in found.items()} == dict.fromkeys(
        "ab", [[1.0] * 3] * 2
    )


def weighted(logits: Tensor, labels: Tensor, columns: Any) -> Tensor:
    return (logits[..., 0] * labels * columns["w"]).sum()


class Callable:
    def __call__(self, logits: Tensor, labels: Tensor, *, columns: Any) -> Tensor:
        return weighted(logits, labels, columns)


def test_a_loss_takes_columns_by_the_name_of_its_parameter() -> None:
    assert takes_columns(weighted)
    assert takes_columns(Callable())
    assert takes_columns(functools.partial(lambda a, b, columns, beta: a, beta=1))
    assert not takes_columns(lambda logits, labels, smoothing=0.1: logits)
    assert not takes_columns(max)
    loss = ColumnLoss(weighted, ("w",))
    packed = targets(
        np.array([[2, 3]], dtype=np.int64), {"w": np.array([[0.5, 4]], dtype=np.float32)}
    )
    assert float(loss(torch.ones(1, 2, 5), torch.from_numpy(packed))) == 13.0  # type: ignore[arg-type]
