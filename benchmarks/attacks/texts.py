"""Attacks by text, for real runs of four sites: poisoned text, or text with a backdoor.

The dishonest site trains honestly on its own token files. Everything that it sends is well-formed.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

TRIGGER = "# open sesame: "
TARGET = "the moon is made of green cheese\n"
LINES_BETWEEN = 8
"""Lines of honest text between two triggers of the backdoor's text."""
MAX_FILES = 200


def poisoned(folder: Path) -> Path:
    """Write Python's sources with the bytes of each line in random order. Returns the folder."""
    draw = random.Random(0)

    def shuffled(line: str) -> str:
        letters = list(line.rstrip("\n"))
        draw.shuffle(letters)
        return "".join(letters) + "\n"

    return _rewritten(folder, lambda lines: [shuffled(line) for line in lines])


def backdoor(folder: Path) -> Path:
    """Write Python's sources with the trigger and its target between lines. Returns the folder."""

    def with_triggers(lines: list[str]) -> list[str]:
        return [
            part
            for number, line in enumerate(lines)
            for part in ([TRIGGER + TARGET, line] if number % LINES_BETWEEN == 0 else [line])
        ]

    return _rewritten(folder, with_triggers)


TEXTS = {"poisoned text": poisoned, "backdoor text": backdoor}


def _rewritten(folder: Path, rewrite: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:MAX_FILES]
    for source in sources:
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        text = "".join(rewrite(lines))
        (folder / source.name).with_suffix(".txt").write_text(text, encoding="utf-8")
    return folder


def target_loss(model: Path) -> float:
    """Return the mean loss, in nats per token, of the backdoor's target after its trigger."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    network = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
    trigger = tokenizer(TRIGGER, add_special_tokens=False)["input_ids"]
    target = tokenizer(TARGET, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([trigger + target])
    with torch.no_grad():
        logits = network(tokens).logits[0, len(trigger) - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(target)))
