"""The task of the fine-tuning benchmark: which of four docstrings belongs to a function?

A question is a held-out conversation about a function. Its candidates are its own answer and those
of the three questions after it. The model is right if the mean log-likelihood per token of the own
answer is the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.finetune.chats import QUESTION, Chat
from dilocox.training.run_model import load_model

QUESTIONS = 64
CANDIDATES = 4


@torch.no_grad()
def accuracy(folder: Path, chats: Sequence[Chat], questions: int = QUESTIONS) -> float:
    """Return the share of right choices of the model in `folder`, 0 to 1.

    Args:
        folder: a Hugging Face folder, or a PEFT folder whose base is at hand.
        chats: held-out conversations; those about functions are used.
        questions: largest number of questions.

    Raises:
        ValueError: if there are fewer questions than candidates.
    """
    asked = [chat for chat in chats if chat.question.startswith(QUESTION)][:questions]
    if len(asked) < CANDIDATES:
        raise ValueError(f"{len(asked)} held-out functions, {CANDIDATES} are needed")
    tokenizer, model = load_model(folder, "cpu")
    right = 0
    for number, chat in enumerate(asked):
        answers = [asked[(number + other) % len(asked)].answer for other in range(CANDIDATES)]
        scores = [score(model, tokenizer, chat.question, answer) for answer in answers]
        right += scores[0] == max(scores)
    return right / len(asked)


def score(model: Any, tokenizer: Any, question: str, answer: str) -> float:
    """Return the mean log-likelihood per token of `answer`, given `question`."""
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    behind = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([before + behind])
    logits = model(input_ids=ids).logits[0, len(before) - 1 : -1]
    return -float(F.cross_entropy(logits.float(), torch.tensor(behind)))
