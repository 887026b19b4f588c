"""Make card payments, of which some are fraud, and write them as prompts and completions.

    python examples/transactions/make_data.py examples/transactions/data

The folder gets `payments.csv` (the table), `train.jsonl` and `held-out.jsonl` (the text). The same
seed gives the same files. Fraud is drawn by chance from a probability that depends on the columns,
so no model can be right about every payment. Held-out records name that probability as `chance`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
COUNTRIES = ("Germany", "France", "Spain", "Norway", "Brazil", "Japan")
SHOPS = ("groceries", "travel", "electronics", "fashion", "fuel", "games")
QUESTION = "Is this card payment fraud? Answer yes or no."
ANSWERS = ("no", "yes")


def payment(random_: random.Random) -> tuple[dict[str, str], float]:
    """Return the columns of one payment, and the probability that it is fraud."""
    home = random_.choice(COUNTRIES)
    country = home if random_.random() < 0.7 else random_.choice(COUNTRIES)
    usual = round(math.exp(random_.gauss(3.7, 0.5)), 2)
    times = math.exp(random_.gauss(0.3, 1.0))
    hour, shop = random_.randrange(24), random_.choice(SHOPS)
    present = random_.random() < 0.5
    risk = -4.0
    risk += 3.0 * (country != home and not present)
    risk += 3.0 * (times > 4)
    risk += 2.5 * (hour < 6)
    risk += 2.0 * (shop in ("electronics", "games") and not present)
    row = {
        "card from": home, "paid in": country, "shop": shop, "hour": str(hour),
        "card present": "yes" if present else "no", "amount": f"{usual * times:.2f}",
        "times the usual amount": f"{times:.1f}",
    }  # fmt: skip
    return row, 1 / (1 + math.exp(-risk))


def text_of(row: Row) -> str:
    """Return a payment as text: a question, and one line per column."""
    return "\n".join([QUESTION, *(f"{name}: {value}" for name, value in row.items())])


def record_of(row: Row, fraud: bool) -> dict[str, str]:
    """Return the record of `data.format = "instruction"` of one payment."""
    return {"prompt": text_of(row), "completion": ANSWERS[fraud]}


def payments(count: int, seed: int) -> tuple[list[dict[str, str]], list[bool], list[float]]:
    """Return rows, labels and probabilities of `count` payments; about one in six is fraud."""
    random_ = random.Random(seed)
    drawn = [payment(random_) for _ in range(count)]
    labels = [random_.random() < chance for _, chance in drawn]
    return [row for row, _ in drawn], labels, [chance for _, chance in drawn]


def write(folder: Path, train: int, held_out: int, seed: int) -> None:
    """Write the three files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, labels, chances = payments(train + held_out, seed)
    with (folder / "payments.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*rows[0], "fraud"])
        table.writerows(
            [*row.values(), ANSWERS[fraud]] for row, fraud in zip(rows, labels, strict=True)
        )
    records = [record_of(row, fraud) for row, fraud in zip(rows, labels, strict=True)]
    _write_lines(folder / "train.jsonl", records[:train])
    asked = zip(records[train:], chances[train:], strict=True)
    _write_lines(folder / "held-out.jsonl", [{**record, "chance": at} for record, at in asked])


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """Read the command line, and write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.folder, given.train, given.held_out, given.seed)
    print(f"{given.folder}: {given.train} payments to train on, {given.held_out} held out")


if __name__ == "__main__":
    main()
