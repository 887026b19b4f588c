"""Models and run files of the acceptance run, at three scales: gpu, cpu and tiny."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEAK_BF16 = {
    "H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "A800": 312e12,
    "B200": 2250e12, "L40S": 362e12, "4090": 165.2e12,
}  # fmt: skip
"""Dense bf16 operations per second by a part of the GPU's name.

Source: src/dilocox/tools/planner/devices.toml.
"""


def peak_of(gpu: str) -> float | None:
    """Return the dense bf16 operations per second of a GPU by its name; None for an unknown GPU."""
    return next((rate for name, rate in PEAK_BF16.items() if name in gpu), None)


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model and the batch of one step: `rows` sequences of `length` tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    length: int
    rows: int
    micro: int

    @property
    def architecture(self) -> dict[str, Any]:
        """The table `model.architecture` of a run file."""
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max(2048, self.length),
            "tie_word_embeddings": True,
        }

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.rows * self.length


_TOY = Shape(2, 64, 4, 2, 16, 128, 512, 64, 4, 2)
_SMALL = Shape(4, 128, 4, 2, 32, 256, 512, 64, 8, 2)

QWEN_06B = {
    "gpu": Shape(28, 1024, 16, 8, 128, 3072, 151936, 2048, 16, 4),
    "cpu": _SMALL,
    "tiny": _TOY,
}
"""The shape of Qwen3-0.6B."""
DENSE_13B = {
    "gpu": Shape(20, 2048, 16, 8, 128, 6144, 151936, 2048, 16, 2),
    "cpu": _SMALL,
    "tiny": _TOY,
}
"""A shape of 1.32e9 parameters."""
STEP = {
    "gpu": Shape(8, 1024, 16, 8, 64, 3072, 32768, 1024, 8, 2),
    "cpu": _SMALL,
    "tiny": _TOY,
}
"""Shape for one step of four micro-batches."""
SITE = {
    "gpu": Shape(12, 512, 8, 4, 64, 1536, 32768, 1024, 32, 8),
    "cpu": Shape(4, 64, 4, 2, 16, 128, 512, 64, 8, 2),
    "tiny": _TOY,
}
"""Shape of whole runs: about 52M parameters on a GPU."""
MIXED = {"gpu": Shape(4, 256, 4, 2, 64, 768, 8192, 256, 8, 4), "cpu": SITE["cpu"], "tiny": _TOY}
"""Shape that is small enough for a site on CPUs."""
LINK = {
    "gpu": Shape(12, 640, 10, 5, 64, 2560, 32768, 1024, 16, 8),
    "cpu": Shape(4, 128, 4, 2, 32, 256, 1024, 64, 8, 8),
    "tiny": _TOY,
}
"""Shape of runs over a link: about 95M parameters on a GPU."""
OUTER = {
    "gpu": Shape(12, 1024, 16, 8, 64, 3072, 32768, 2048, 128, 8),
    "cpu": _SMALL,
    "tiny": _TOY,
}
"""Shape of the part `outer`: 0.18e9 parameters, 262,144 tokens a step. The share of a round does
not depend on the model, because both the step and the boundary grow with its parameters."""


def run_file(
    folder: Path,
    name: str,
    shape: Shape,
    data: Path,
    scale: str,
    *,
    device: str | None = None,
    sites: tuple[str, ...] = ("north", "south"),
    **sections: Mapping[str, Any],
) -> Path:
    """Write the run file `name`.toml in `folder` and return its path.

    The file has the product's defaults except for sizes. `sections` add keys or replace them.
    """
    import tomli_w

    raw: dict[str, Any] = {
        "run": {"name": name, "folder": str(folder / name)},
        "model": {"architecture": shape.architecture},
        "data": {
            "source": "python-stdlib",
            "folder": str(data / f"tokens-{shape.length}"),
            "vocabulary_size": 4096 if shape.vocabulary >= 4096 else 300,
            "sequence_length": shape.length,
            "max_documents": 3000 if scale == "gpu" else 60,
            "validation_sequences": 16,
        },
        "site": {
            "batch_size": shape.rows,
            "micro_batch_size": shape.micro,
            "device": device or ("cuda" if scale == "gpu" else "cpu"),
        },
        "outer": {"rounds": 4},
        "sites": {site: {} for site in sites},
        "evaluation": {"completion_tokens": 0},
    }
    for section, keys in sections.items():
        raw[section] = {**raw.get(section, {}), **keys}
    if "steps" in raw["outer"]:
        del raw["outer"]["rounds"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(raw), encoding="utf-8")
    return path
