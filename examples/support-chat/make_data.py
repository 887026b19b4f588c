"""Make conversations of a shop's support, and write them as JSON lines of messages.

    python examples/support-chat/make_data.py examples/support-chat/data

The folder gets `train.jsonl` and `held-out.jsonl`. The shop and all that is said of it are made up,
so only a model that was trained on the conversations can know the answers. Held-out conversations
ask for the same facts in other words. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSTEM = "You are the support assistant of Fjordlys, a shop for lamps. Answer in one sentence."
LAMPS = ("Alta", "Bodo", "Narvik", "Tromso", "Vardo", "Lofoten")
ASKED = {
    "price": (
        ("What does the {lamp} lamp cost?", "How much is the {lamp}?", "Price of the {lamp}?",
         "I want to buy the {lamp}. What do I pay?"),
        ("Could you tell me the price of the {lamp} lamp?", "How expensive is the {lamp} lamp?"),
        "The {lamp} lamp costs {value}.",
    ),
    "guarantee": (
        ("How long is the guarantee of the {lamp}?", "Guarantee on the {lamp} lamp?",
         "My {lamp} broke. For how long is it guaranteed?",
         "How many years of guarantee does the {lamp} lamp have?"),
        ("For what time is the {lamp} lamp under guarantee?",
         "Does the {lamp} come with a guarantee, and how long is it?"),
        "The {lamp} lamp has a guarantee of {value}.",
    ),
    "delivery": (
        ("How long does delivery of the {lamp} take?", "When will my {lamp} lamp arrive?",
         "Delivery time of the {lamp}?", "I ordered a {lamp}. How many days until it comes?"),
        ("In how many days do you deliver the {lamp} lamp?",
         "How soon can the {lamp} be at my house?"),
        "The {lamp} lamp is delivered in {value}.",
    ),
    "bulb": (
        ("Which bulb does the {lamp} need?", "Bulb for the {lamp} lamp?",
         "The bulb of my {lamp} is broken. Which one do I buy?", "What bulb fits the {lamp}?"),
        ("What kind of bulb goes into the {lamp} lamp?",
         "Which bulb should I order for the {lamp}?"),
        "The {lamp} lamp takes a bulb of type {value}.",
    ),
}  # fmt: skip
"""By topic: questions to train on, questions held out, and the answer."""


@dataclass(frozen=True)
class Fact:
    """One fact about a lamp."""

    lamp: str
    topic: str
    value: str

    @property
    def answer(self) -> str:
        """The assistant's answer."""
        return ASKED[self.topic][2].format(lamp=self.lamp, value=self.value)

    def questions(self, held_out: bool) -> list[str]:
        """Return the questions about this fact: those held out, or those to train on."""
        return [text.format(lamp=self.lamp) for text in ASKED[self.topic][int(held_out)]]


def facts(seed: int) -> list[Fact]:
    """Return all facts about the shop's lamps."""
    random_ = random.Random(seed)
    found = []
    for lamp in LAMPS:
        values = {
            "price": f"{random_.randrange(30, 300)} kroner",
            "guarantee": f"{random_.randrange(2, 12)} years",
            "delivery": f"{random_.randrange(3, 25)} days",
            "bulb": f"{random_.choice('EGRT')}{random_.randrange(10, 60)}",
        }
        found += [Fact(lamp, topic, value) for topic, value in values.items()]
    return found


def conversation(asked: Sequence[tuple[str, Fact]]) -> dict[str, Any]:
    """Return a record of `data.format = "chat"` with these questions and their answers."""
    messages = [{"role": "system", "content": SYSTEM}]
    for question, fact in asked:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": fact.answer})
    return {"messages": messages}


def training(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` conversations of one to three questions each."""
    random_, known = random.Random(seed + 1), facts(seed)
    made = []
    for _ in range(count):
        chosen = random_.sample(known, random_.randrange(1, 4))
        made.append(
            conversation([(random_.choice(fact.questions(False)), fact) for fact in chosen])
        )
    return made


def held_out(seed: int) -> list[dict[str, Any]]:
    """Return one conversation for each held-out question; `value` is what an answer must say."""
    return [
        {**conversation([(question, fact)]), "value": fact.value}
        for fact in facts(seed)
        for question in fact.questions(True)
    ]


def write(folder: Path, count: int, seed: int) -> int:
    """Write both files; return the number of held-out conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = held_out(seed)
    _write_lines(folder / "train.jsonl", training(count, seed))
    _write_lines(folder / "held-out.jsonl", asked)
    return len(asked)


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """Read the command line, and write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asked = write(given.folder, given.conversations, given.seed)
    print(f"{given.folder}: {given.conversations} conversations to train on, {asked} held out")


if __name__ == "__main__":
    main()
