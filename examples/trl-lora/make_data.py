"""Make records of preferences about sums: python make_data.py FILE [SEED]

A record has a prompt, a chosen answer and a rejected one, as TRL's `DPOTrainer` reads them.
"""

import json
import random
import sys
from pathlib import Path

draw = random.Random(sys.argv[2] if len(sys.argv) > 2 else "0")
lines = []
for _ in range(500):
    a, b = draw.randrange(10), draw.randrange(10)
    wrong = a + b + draw.choice((-2, -1, 1, 2))
    lines.append(
        json.dumps({"prompt": f"{a} plus {b} is", "chosen": f" {a + b}.", "rejected": f" {wrong}."})
    )
Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
