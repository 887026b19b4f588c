"""Draw the terminal output of a finished run as an SVG picture, from the run's records.

    python scripts/draw_run.py runs/quickstart docs/quickstart.svg

The lines are those of the real run: the code that prints on a terminal formats the run's own
metrics.jsonl and summary.json.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path

from rich.console import Console

from dilocox.config.run_config import load_run
from dilocox.training.launch.console import Display


def main() -> None:
    """Read a run folder, and write an SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    console = Console(
        record=True, force_terminal=True, width=160, file=io.StringIO(), highlight=False
    )
    display = Display(load_run(arguments.folder / "run.toml"), console)
    console.print("$ make quickstart")
    for line in (arguments.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        display.show(json.loads(line))
    display.summary(json.loads((arguments.folder / "summary.json").read_text(encoding="utf-8")))
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    picture = console.export_svg(title="dilocox", unique_id="dilocox")
    # No web fonts: the reader's own monospace font is enough.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    picture = "\n".join(line.rstrip() for line in picture.splitlines() if line.strip())
    arguments.picture.write_text(picture + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
