"""Small runs that are about to start, and text for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.data import prepare
from dilocox.errors import DilocoxError

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def write_text(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    for number in range(30):
        words = [WORDS[(number * 7 + seed * 3 + i * i) % len(WORDS)] for i in range(200)]
        (folder / f"{number}.txt").write_text(" ".join(words) + f" {number}", encoding="utf-8")
    return folder


def prepared(root: Path) -> Path:
    """`root`, with text and its token files."""
    write_text(root / "text", 0)
    run = config(root)
    prepare(run.data, run.data_folder, run.run.seed)
    return root


def config(root: Path, name: str = "run", **sections: Any) -> RunConfig:
    raw: dict[str, dict[str, Any]] = {
        "run": {"name": name, "folder": str(root / "{name}")},
        "model": {"architecture": dict(ARCHITECTURE)},
        "data": {
            "source": str(root / "text"),
            "folder": str(root / "tokens"),
            "vocabulary_size": 270,
            "sequence_length": 16,
            "validation_fraction": 0.2,
        },
        "site": {"stages": 2, "batch_size": 4, "micro_batch_size": 2},
        "outer": {"rounds": 2, "inner_steps": 4, "fragments": 2},
        "sites": {"paris": {}, "lyon": {}},
    }
    for section, values in sections.items():
        raw.setdefault(section, {}).update(values)
    return resolve_run(raw)


def refusal(run: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(DilocoxError) as caught:
        run(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text
