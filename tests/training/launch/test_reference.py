"""The reference of preference training: what the start model says of every answer by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.data import TokenFiles, prepare
from dilocox.data.flags import COUNTED, SECOND, STARTS
from dilocox.errors import DataError
from dilocox.training.launch import reference
from tests.data.chats import write_records
from tests.data.test_preferences import pairs
from tests.support.base_model import write_base

pytestmark = pytest.mark.waits


def a_run(base: Path, source: Path) -> RunConfig:
    return resolve_run(
        {
            "model": {"path": str(base)},
            "data": {
                "source": str(source), "format": "preference", "sequence_length": 128,
                "validation_fraction": 0.2,
            },
            "site": {"device": "cpu", "precision": "fp32"},
            "sites": {"paris": {}, "lyon": {}},
        }
    )  # fmt: skip


def made(config: RunConfig, folder: Path) -> TokenFiles:
    def finish(partial: Path, content: dict[str, Any]) -> None:
        reference.add_reference(config, partial, content, lambda step, share: None)

    return prepare(config.data, folder, seed=0, finish=finish)


def test_it_is_the_start_models_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(reference, "LOGITS", 272 * 300)
    base, other = write_base(tmp_path / "base"), write_base(tmp_path / "other", seed=1)
    config = a_run(base, write_records(tmp_path / "pairs.jsonl", pairs()))
    files = made(config, tmp_path / "data")
    files.verify()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    compared = 0
    for split in ("train", "validation"):
        flags, tokens = files.flags(split), files.tokens(split)
        assert flags is not None
        values = files.columns(split)["reference"]
        starts = flags.places_with(STARTS | SECOND)
        for at, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            first, length = np.array([at]), int(end - at)
            ids = torch.from_numpy(tokens.gather(first, length))
            counts = (flags.gather(first, length)[0] & COUNTED) > 0
            found = values.gather(first, length)[0]
            with torch.no_grad():
                likelihoods = model(ids).logits[0, :-1].double().log_softmax(-1)
            wanted = likelihoods.gather(1, ids[0, 1:, None])[:, 0].numpy()
            assert (found[~counts] == 0).all()
            assert np.allclose(found[1:][counts[1:]], wanted[counts[1:]], atol=2e-6)
            compared += int(counts[1:].sum())
    assert compared > 1000
    reference.check_reference(config, files)
    with pytest.raises(DataError, match=r"are of the model with digest .*, and model.*other"):
        reference.check_reference(a_run(other, tmp_path / "pairs.jsonl"), files)
    assert made(a_run(other, tmp_path / "pairs.jsonl"), tmp_path / "more").digest != files.digest
