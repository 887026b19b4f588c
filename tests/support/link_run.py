"""A real run in a lab whose links change twice while it goes on; for a test.

python -m tests.support.link_run FOLDER CORPUS FAST SLOW ROUND ROUND: prints one line of JSON with
the plans that were made, and the rounds that had been reported when the links became SLOW, after
the first ROUND, and FAST again, after the second. Steps are declared and their number is pinned, so
that plans differ by what was measured of the link alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dilocox.config.run_config import load_run
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.results import Record
from dilocox.tools.testbed.run import run

FILE = """\
[run]
name = "links"
folder = "{folder}/links"
[model.architecture]
model_type = "qwen3"
hidden_size = 128
intermediate_size = 384
num_hidden_layers = 5
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 32
max_position_embeddings = 128
tie_word_embeddings = true
[data]
source = "{corpus}"
vocabulary_size = 300
sequence_length = 32
validation_sequences = 2
folder = "{folder}/data"
[site]
batch_size = 4
micro_batch_size = 4
device = "cpu"
[outer]
steps = 270
inner_steps = 10
[control]
step_seconds = 0.4
work = 1.0
[checkpoint]
every_rounds = 0
[evaluation]
completion_tokens = 0
[sites]
paris = {{}}
lyon = {{}}
"""
QUOTA = 0.5


def main() -> None:
    """Run it and print what was planned."""
    folder, corpus, fast, slow = Path(sys.argv[1]), *sys.argv[2:5]
    due = list(zip(map(int, sys.argv[5:7]), (slow, fast), strict=True))
    file = folder / "links.toml"
    file.write_text(FILE.format(folder=folder, corpus=corpus), encoding="utf-8")
    plans: list[Record] = []
    changed: list[int] = []
    with Lab(["paris", "lyon"], fast, quota=QUOTA) as lab:

        def heard(record: Record) -> None:
            if record["kind"] == "plan":
                plans.append(record)
            whole = record["kind"] == "round" and not record.get("site")
            if whole and due and record["round"] >= due[0][0]:
                lab.set(*(f"{site}={due[0][1]}" for site in lab.sites))
                changed.append(record["round"])
                del due[0]

        result = run(lab, load_run(file), on_record=heard)
    print(json.dumps({"plans": plans, "changed": changed, "rounds": result.summary["rounds"]}))


if __name__ == "__main__":
    main()
