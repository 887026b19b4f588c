"""Local tasks of lm-eval, and a small model in a Hugging Face folder to evaluate on the tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CHOICE = "number_choice"
"""A multiple-choice task; its metrics are acc and acc_norm."""
PROSE = "plain_prose"
"""A task of whole documents; its metrics are perplexities and bits per byte."""
EXAMPLES = 6


def write_tasks(folder: Path) -> Path:
    """Write the two tasks with their data to `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = [
        {"question": f"{n} and {n} are", "choices": [str(2 * n), str(2 * n + 1)], "answer": 0}
        for n in range(1, EXAMPLES + 1)
    ]
    texts = [{"text": f"def double_{n}(value): return {n} * value"} for n in range(EXAMPLES)]
    for name, rows in (("questions", questions), ("texts", texts)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "choice.yaml").write_text(
        f"""\
task: {CHOICE}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
""",
        encoding="utf-8",
    )
    (folder / "prose.yaml").write_text(
        f"""\
task: {PROSE}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: bits_per_byte}}
""",
        encoding="utf-8",
    )
    return folder


def write_model(folder: Path, seed: int = 0, **saving: Any) -> Path:
    """Write a small model with its tokenizer to `folder`, and return it.

    `saving`: options of transformers' `save_pretrained`.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dilocox.data.tokenizer import train_tokenizer

    words = ["def main(): return the sum of all values", "class Value: pass"] * 20
    encoder = train_tokenizer(iter([words]), 262, folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=262,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=encoder.end_of_text,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder, **saving)
    return folder
