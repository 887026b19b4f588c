"""PyTorch's words for its programmers are left out of logs, and nobody else's."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dilocox.utils.library_warnings import silence, silence_saves

pytestmark = pytest.mark.waits


def test_a_write_by_one_process_says_nothing(tmp_path: Path) -> None:
    def written(name: str) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if name == "silent":
                silence_saves()
            dcp.save({"x": torch.zeros(2)}, checkpoint_id=tmp_path / name, no_dist=True)
        return [str(each.message) for each in caught]

    # The library still says it: else this module is of no use any more.
    assert any("torch.distributed is disabled" in text for text in written("loud"))
    assert written("silent") == []


def test_others_words_stay() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence()
        old = "`torch.distributed.all_gather_into_tensor` is deprecated."
        warnings.warn(old, FutureWarning, stacklevel=1)
        warnings.warn("`my.function` goes", FutureWarning, stacklevel=1)
        warnings.warn("of a user's own loss", UserWarning, stacklevel=1)
    assert [str(each.message) for each in caught] == ["`my.function` goes", "of a user's own loss"]
