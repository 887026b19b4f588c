"""Ask models held-out questions of the shop's support, and count the answers that are right.

    python examples/support-chat/ask.py examples/support-chat/data/held-out.jsonl BASE FINE-TUNED

A model is a run folder or a Hugging Face folder with a chat template. An answer is right if it
says the value that the record names.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENS = 40


def is_right(answer: str, value: str) -> bool:
    """Return whether `answer` says `value`: as whole words, whatever their case."""
    said = f" {_words(answer)} "
    return f" {_words(value)} " in said


def _words(text: str) -> str:
    kept = "".join(letter if letter.isalnum() else " " for letter in text.lower())
    return " ".join(kept.split())


def answers_of(model: str, records: Sequence[dict[str, Any]], device: str = "cpu") -> list[str]:
    """Return the most likely answer to each record's last question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(model) / "model" if (Path(model) / "model").is_dir() else Path(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Not every processor has instructions for bf16; without them a question takes minutes.
    dtype = torch.float32 if device == "cpu" else "auto"
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    found = []
    for record in records:
        asked = tokenizer.apply_chat_template(
            record["messages"][:-1], add_generation_prompt=True, return_tensors="pt",
            return_dict=True,
        ).to(device)  # fmt: skip
        with torch.no_grad():
            said = network.generate(**asked, max_new_tokens=TOKENS, do_sample=False)
        new = said[0, asked["input_ids"].shape[1] :]
        found.append(str(tokenizer.decode(new, skip_special_tokens=True)).strip())
    return found


def main() -> None:
    """Read the command line, and print one line per model, and one answer of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    records = [json.loads(line) for line in given.records.read_text(encoding="utf-8").splitlines()]
    print(f"question: {records[0]['messages'][-2]['content']}")
    for model in given.models:
        found = answers_of(model, records, given.device)
        right = sum(map(is_right, found, [record["value"] for record in records]))
        print(f"{model}: {right} of {len(records)} answers are right; {found[0]!r}")


if __name__ == "__main__":
    main()
