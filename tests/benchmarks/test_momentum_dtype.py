"""The benchmark of an outer momentum in bf16: its pairs, and what is made of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import momentum_dtype


def test_a_row_by_hand() -> None:
    found = momentum_dtype.row((0.8, 0.5), [2.0, 2.2, 2.1], [2.002, 2.2, 2.1])
    assert (found["fp32"], found["bf16"]) == (2.1, 2.1007)
    # 0.1 %, nothing, nothing; a standard deviation of 0.1 in 2.1.
    assert found["difference"] == 0.0
    assert found["difference_high"] == pytest.approx(0.001)
    assert found["spread"] == pytest.approx(0.1 / 2.1, rel=1e-3)
    assert momentum_dtype.row((0.8, 0.5), [2.0], [2.0])["spread"] is None


@pytest.mark.slow
def test_a_pair_differs_in_the_momentum_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 8, (4000,), generator=draw).to(torch.uint8) for _ in range(4)]
    held_out = torch.cat([momentum_dtype.lm.draw(text, 4, draw) for text in texts])

    def loss(dtype: str) -> float:
        return momentum_dtype.train(texts, held_out, 3, 0, (0.7, 0.9), dtype)

    wide = loss("fp32")
    assert loss("fp32") == wide
    narrow = loss("bf16")
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.01)
    # 8 of 256 bytes occur: something was learned.
    assert wide < 4.0
