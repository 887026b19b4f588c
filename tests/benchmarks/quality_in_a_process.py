"""Real rows of three steps on a made-up text: FOLDER and inner learning rates; a row a line."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.quality import data as quality_data
from benchmarks.quality import run as quality_run
from benchmarks.quality.jobs import Job
from benchmarks.quality.rows import Entry


def main() -> None:
    """Train and print."""
    folder = Path(sys.argv[1])
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=400)) for _ in range(200)]
    quality_data.read_corpus = lambda _wikitext: texts
    quality_data.HELD_OUT_SEQUENCES = 16
    # The coordinator of a run that fails answers for two more beats, fifths of a heartbeat.
    quality_run.PATIENT = {**quality_run.PATIENT, "heartbeat": 10.0}
    text = quality_data.Text.write(folder / "text", None)
    text.tokenise(0, [2])
    entry = Entry("x", "diloco", {"outer.inner_steps": 1}, published_inner_steps=500)
    for rate in sys.argv[2:]:
        job = Job(entry, "paper", 2, False, 0, {"inner.learning_rate": float(rate)})
        config = quality_run.configuration(job, text, folder / "run", steps=3)
        print(json.dumps(quality_run.train(job, config, folder / "log", keep=False)))


if __name__ == "__main__":
    main()
