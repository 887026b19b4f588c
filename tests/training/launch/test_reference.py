"""The reference of preference training: what the start model says of every answer by itself."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.data import TokenFiles, prepare
from dilocox.data.flags import COUNTED, SECOND, STARTS
from dilocox.errors import DataError, ModelError
from dilocox.models.adapter_folder import AdapterFolder
from dilocox.models.network import load_network
from dilocox.training.launch import reference
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from tests.data.chats import write_records
from tests.data.test_preferences import pairs
from tests.support.base_model import peft_folder, write_base

pytestmark = pytest.mark.waits


def a_run(
    base: Path, source: Path, attention: str = "sdpa", adapter: dict[str, Any] | None = None
) -> RunConfig:
    return resolve_run(
        {
            **({} if adapter is None else {"adapter": adapter}),
            "model": {"path": str(base), "attention": attention},
            "data": {
                "source": str(source), "format": "preference", "sequence_length": 128,
                "validation_fraction": 0.2,
            },
            "site": {"device": "cpu", "precision": "fp32"},
            "sites": {"paris": {}, "lyon": {}},
        }
    )  # fmt: skip


def adapted(place: Path) -> tuple[Path, Path, Path]:
    """Write a base model, pairs, and trained adapters of PEFT on that model."""
    base = write_base(place / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        folder = peft_folder(base, place / "peft")
    return base, write_records(place / "pairs.jsonl", pairs()), folder


def made(config: RunConfig, folder: Path) -> TokenFiles:
    def finish(partial: Path, content: dict[str, Any]) -> None:
        reference.add_reference(config, partial, content, lambda step, share: None)

    return prepare(config.data, folder, seed=0, finish=finish)


def agrees(config: RunConfig, files: TokenFiles) -> bool:
    """Whether the column has what the whole model says of each answer by itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(config.model.path), dtype=torch.float32, attn_implementation=config.model.attention
    )
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
    return compared > 1000


def test_it_is_the_start_models_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "LOGITS", 272 * 300)
    base, other = write_base(tmp_path / "base"), write_base(tmp_path / "other", seed=1)
    config = a_run(base, write_records(tmp_path / "pairs.jsonl", pairs()))
    files = made(config, tmp_path / "data")
    files.verify()
    assert agrees(config, files)
    reference.check_reference(config, files)
    with pytest.raises(DataError, match=r"are of the model with digest .*, and model.*other"):
        reference.check_reference(a_run(other, tmp_path / "pairs.jsonl"), files)
    assert made(a_run(other, tmp_path / "pairs.jsonl"), tmp_path / "more").digest != files.digest


def test_adapters_that_the_run_starts_from_belong_to_it(tmp_path: Path) -> None:
    base, source, folder = adapted(tmp_path)
    config = a_run(base, source, adapter={"rank": 2, "alpha": 4.0, "path": str(folder)})
    files, plain = made(config, tmp_path / "data"), a_run(base, source)
    # Their values count, and the scaling; not how the files hold them.
    tensors = load_file(folder / ADAPTER_FILE)
    save_file({name: each.double() for name, each in tensors.items()}, folder / ADAPTER_FILE,
              metadata={"format": "pt", "by": "another program"})  # fmt: skip
    reference.check_reference(config, files)
    louder = a_run(base, source, adapter={"rank": 2, "alpha": 8.0, "path": str(folder)})
    with pytest.raises(DataError, match=r"of other adapters than adapter\.path holds"):
        reference.check_reference(louder, files)
    save_file(tensors, folder / ADAPTER_FILE)
    merged = AdapterFolder.of(folder).added_to(load_network(base, None, torch.float32))
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert agrees(a_run(tmp_path / "merged", source), files)
    reference.check_reference(config, files)
    with pytest.raises(DataError, match=r"of other adapters than adapter\.path holds; set data"):
        reference.check_reference(plain, files)
    # Adapters without a path change nothing at first, so the base model is the reference.
    fresh = a_run(base, source, adapter={"rank": 2})
    of_base = made(plain, tmp_path / "plain")
    assert made(fresh, tmp_path / "fresh").digest == of_base.digest != files.digest
    with pytest.raises(DataError, match="of other adapters than"):
        reference.check_reference(config, of_base)
    # A run that goes on has the token files of the earlier run, with the reference of its start.
    handed = a_run(base, source, adapter={"rank": 2, "alpha": 4.0, "handover": str(folder)})
    reference.check_reference(handed, files)


def test_adapters_are_computed_as_the_run_computes_them(tmp_path: Path) -> None:
    """The folder's configuration may name fewer layers, and no base model."""
    base, source, folder = adapted(tmp_path)
    config = a_run(base, source, adapter={"rank": 2, "alpha": 4.0, "path": str(folder)})
    whole = made(config, tmp_path / "data")
    said = json.loads((folder / ADAPTER_CONFIG).read_text())
    changed = {**said, "target_modules": ["q_proj"], "base_model_name_or_path": None}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(changed))
    assert made(config, tmp_path / "again").digest == whole.digest


def test_a_model_that_caps_attention_is_a_reference_too(tmp_path: Path) -> None:
    """Gemma 2 cannot be computed by sdpa."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    base = write_base(tmp_path / "base")
    keys = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    capped = Gemma2Config(vocab_size=272, attn_logit_softcapping=0.5, **keys, **heads)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(capped).save_pretrained(base)
    config = a_run(base, write_records(tmp_path / "pairs.jsonl", pairs()), "eager")
    files = made(config, tmp_path / "data")
    assert agrees(config, files)
    reference.check_reference(config, files)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = a_run(base, write_records(tmp_path / "pairs.jsonl", pairs()))
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(ModelError, match=r"^model\.path .*base: cannot be loaded as the ref") as e:
        made(config, tmp_path / "data")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "data").exists()
