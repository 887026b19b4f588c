"""Run file of a training that takes seconds, for benchmarks of everything around training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def tiny_run(root: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the sections of a run file of one stage, without sites. Token files are in `root`."""
    return {
        "model": {"architecture": dict(MODEL)},
        "data": {
            "source": "python-stdlib",
            "folder": str(root / "data"),
            "vocabulary_size": 512,
            "sequence_length": 64,
            "max_documents": 150,
        },
        "site": {"batch_size": 8, "micro_batch_size": 4, "threads": 1, "device": "cpu"},
        "inner": {"learning_rate": 3e-3, "warmup_steps": 20},
        "outer": {"rounds": rounds, "inner_steps": 10, "fragments": 2},
        "control": {"adapt": "off"},
        "evaluation": {"completion_tokens": 0},
        "record": {"enabled": False},
    }
