"""The rows of the codec benchmark: bits are those of the frames, and every message is counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks import codecs


@pytest.mark.parametrize(
    ("spec", "payload"), [("int4", 16896), ("topk:64", 672), ("lowrank:8", None)]
)
def test_a_row_says_what_is_really_sent(spec: str, payload: int | None) -> None:
    values = torch.randn(1 << 15, generator=torch.Generator().manual_seed(0))
    row = codecs.row(spec, values, repetitions=2)
    assert row["codec"] == spec
    assert row["values"] == 1 << 15
    if payload is not None:
        assert row["bits_per_value"] == round(8 * (payload + 64) / (1 << 15), 4)
    assert 0 < row["error"] < 1
    for act in ("encode", "decode"):
        assert row[f"{act}_gb_s"] > 0
        assert row[f"{act}_ratio_low"] <= row[f"{act}_ratio"] <= row[f"{act}_ratio_high"]
    assert (row["owner_ratio"] is not None) == spec.startswith("lowrank")
