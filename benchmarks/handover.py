"""Measures the cost of continuing a run with other sites, stages or shards.

A run of two sites of two stages is trained to its end. Other runs start from its checkpoint at the
middle (`dilocox handover`), and continue to the same number of inner steps. One has the same sites
and stages, so only the state that a handover drops differs (residuals, inner moments, exchanges in
flight). Others have other stages and shards, one site, or three sites. Figures are the held-out
loss at the end, its ratio to the loss of the uninterrupted run, and the total number of sequences.
More sites train on more text in the same steps. All runs are real processes on this machine,
without shaped links; nothing is timed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import dilocox
from benchmarks import common
from benchmarks.tiny_run import tiny_run
from dilocox.training.portable_checkpoint_export import hand_over


@dataclass(frozen=True)
class Layout:
    """Sites, stages and shards with which a run continues."""

    name: str
    sites: int
    stages: int
    shards: int = 1
    takes_over: bool = True
    """False for the uninterrupted run."""


ALONE = Layout("left alone", 2, 2, takes_over=False)
LAYOUTS = (
    Layout("the same", 2, 2),
    Layout("1 stage x 2 shards", 2, 1, 2),
    Layout("1 site", 1, 1),
    Layout("3 sites", 3, 1),
)
COLUMNS = {
    "goes_on_with": "s",
    "sites": "d",
    "stages": "d",
    "shards": "d",
    "val_loss": ".4f",
    "ratio": ".4f",
    "sequences": "d",
}


def run_file(root: Path, layout: Layout, rounds: int, codec: str) -> Path:
    """Write a run file and return its path."""
    name = layout.name.replace(" ", "-")
    content = tiny_run(root, rounds)
    if layout.takes_over:
        content["model"] = {"path": str(root / "start"), "handover": True}
    content["site"] |= {"stages": layout.stages, "shards": layout.shards, "precision": "fp32"}
    content |= {
        "run": {"name": name, "folder": str(root / "{name}")},
        "compression": {"codec": codec},
        "checkpoint": {"every_rounds": rounds // 2, "keep": 5},
        "network": {"heartbeat": 30.0},
        "sites": {f"site-{number}": {} for number in range(layout.sites)},
    }
    return common.write_run_file(root, name, content)


def train(root: Path, layout: Layout, rounds: int, codec: str) -> common.Row:
    """Train a run, and return its result row. Raises `CommandError`."""
    common.say(f"{codec}, {layout.name}")
    path = run_file(root, layout, rounds, codec)
    common.run_dilocox("train", str(path))
    summary = dilocox.load_run(path).folder / "summary.json"
    found = json.loads(summary.read_text(encoding="utf-8"))
    return {
        "codec": codec,
        "goes_on_with": layout.name,
        "sites": layout.sites,
        "stages": layout.stages,
        "shards": layout.shards,
        "val_loss": found["val_loss_last"],
        "sequences": found["sequences_committed"],
    }


def compare(codec: str, rounds: int) -> list[common.Row]:
    """Return the rows of one uninterrupted run and of all layouts. Raises `CommandError`."""
    with tempfile.TemporaryDirectory(prefix="dilocox-handover-") as folder:
        root = Path(folder)
        rows = [train(root, ALONE, rounds, codec)]
        config = dilocox.load_run(root / "left-alone.toml")
        middle = sorted((config.folder / "checkpoints").glob("tick-*"))[0]
        made = hand_over(config.folder, root / "start", int(middle.name.removeprefix("tick-")))
        common.say(made.line)
        rows += [train(root, layout, rounds, codec) for layout in LAYOUTS]
    return [{**row, "ratio": row["val_loss"] / rows[0]["val_loss"]} for row in rows]


def main() -> int:
    """Train, print and write. Returns the exit code."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    on = common.machine()
    rounds = 10 if options.quick else 40
    codecs = ["topk:64"] if options.quick else ["int4", "topk:64"]
    rows, code = [], 0
    try:
        for codec in codecs:
            rows += compare(codec, rounds)
    except common.CommandError as error:
        # Results measured before the failure are kept.
        common.say(f"handover: {error}")
        code = 1
    if rows:
        print(common.table(rows, {"codec": "s", **COLUMNS}))
    if options.json and rows:
        common.write_json(options.json, "handover", on, {"rounds": rounds}, rows)
    return code


if __name__ == "__main__":
    sys.exit(main())
