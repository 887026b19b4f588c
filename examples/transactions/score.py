"""Print the AUROC of models that say yes or no, on held-out prompts and completions.

    python examples/transactions/score.py examples/transactions/data/held-out.jsonl BASE FINE-TUNED

A model is a run folder or a Hugging Face folder. The score of a prompt is the model's log
probability of "yes" minus that of "no" as the answer's first token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ANSWERS = ("no", "yes")
BATCH = 16


def auroc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Return the chance that a positive has a higher score than a negative; ties count half.

    Raises `ValueError` without positives, without negatives, or with a score that is NaN.
    """
    values, positive = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    good, bad = int(positive.sum()), int((~positive).sum())
    if not good or not bad:
        raise ValueError("AUROC needs positives and negatives")
    if np.isnan(values).any():
        raise ValueError("a score is not a number")
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[positive].sum() - good * (good + 1) / 2) / (good * bad))


def scores_of(model: str, prompts: Sequence[str], device: str = "cpu") -> list[float]:
    """Return the score of each prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(model) / "model" if (Path(model) / "model").is_dir() else Path(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Not every processor has instructions for bf16; without them a question takes minutes.
    dtype = torch.float32 if device == "cpu" else "auto"
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    no, yes = (first_token(tokenizer, answer) for answer in ANSWERS)
    found: list[float] = []
    for start in range(0, len(prompts), BATCH):
        rows = [prompt_tokens(tokenizer, prompt) for prompt in prompts[start : start + BATCH]]
        width = max(map(len, rows))
        ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        with torch.no_grad():
            logits = network(ids.to(device), attention_mask=mask.to(device)).logits
        for row, tokens in enumerate(rows):
            last = logits[row, len(tokens) - 1].float()
            found.append(float(last[yes] - last[no]))
    return found


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens before the answer, by the chat template if the tokenizer has one."""
    if not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    asked = [{"role": "user", "content": prompt}]
    found = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
    return list(found["input_ids"])


def first_token(tokenizer: Any, answer: str) -> int:
    """Return the first token of an answer."""
    return int(tokenizer(answer, add_special_tokens=False)["input_ids"][0])


def main() -> None:
    """Read the command line, and print one line per model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    records = [json.loads(line) for line in given.records.read_text(encoding="utf-8").splitlines()]
    labels = [record["completion"] == ANSWERS[1] for record in records]
    best = auroc([record["chance"] for record in records], labels)
    print(f"the probabilities that the labels were drawn from: AUROC {best:.3f}")
    for model in given.models:
        found = scores_of(model, [record["prompt"] for record in records], given.device)
        print(f"{model}: AUROC {auroc(found, labels):.3f} on {len(labels)} held-out payments")


if __name__ == "__main__":
    main()
